"""Models for the ExecuTorch tests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.ao.quantization import QConfigMapping, get_default_qconfig_mapping
from torch.fx import GraphModule

import torchq_compat as tc
from tests.helpers.once import made_once
from tests.helpers.oracle import by_us, leaves
from torchq_compat.custom_config import PrepareCustomConfig
from torchq_compat.lower.executorch.lowering import ExecutorchProgram, to_executorch
from torchq_compat.profiles import int16_parts
from torchq_compat.recurrent_parts import get_individually_observed_parts

__all__ = [
    "IN_16_BITS",
    "PER_CHANNEL",
    "PER_TENSOR",
    "Tagger",
    "Words",
    "converted",
    "image_classifier",
    "linear",
    "linear_program",
    "same_bits",
    "tagger",
]

PER_TENSOR = get_default_qconfig_mapping("qnnpack")
PER_CHANNEL = get_default_qconfig_mapping("x86")


class Tagger(nn.Module):
    def __init__(self, recurrent: nn.Module, features: int = 12) -> None:
        super().__init__()
        self.rnn = recurrent
        self.head = nn.Linear(features, 5)

    def forward(self, x: Tensor) -> Any:
        outputs, state = self.rnn(x)
        return {"tags": self.head(outputs), "state": (state, outputs)}


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 8)
        self.head = nn.Linear(8, 12)

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.head(self.table(words))
        return scores


def image_classifier() -> nn.Module:
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(1), nn.Linear(128, 10)
    return nn.Sequential(*layers)


class ObservedIn16Bits(torch.ao.nn.quantizable.LSTM):
    @classmethod
    def from_float(cls, other: nn.Module, qconfig: Any = None) -> Any:
        return get_individually_observed_parts(other, **int16_parts(other))


IN_16_BITS = PrepareCustomConfig().set_float_to_observed_mapping(nn.LSTM, ObservedIn16Bits)


def converted(
    model: nn.Module,
    mapping: QConfigMapping,
    example: Callable[[], Tensor],
    custom: PrepareCustomConfig | None = None,
) -> GraphModule:
    custom = custom or tc.get_default_prepare_custom_config()
    return by_us(model.eval(), mapping, [(example(),), (example(),)], custom)[1]


def tagger(
    recurrent: nn.Module,
    mapping: QConfigMapping = PER_TENSOR,
    features: int = 12,
    custom: PrepareCustomConfig | None = None,
) -> GraphModule:
    """A converted Tagger of 8 inputs."""
    return converted(Tagger(recurrent, features), mapping, lambda: torch.randn(12, 4, 8), custom)


@made_once
def linear() -> GraphModule:
    return converted(nn.Sequential(nn.Linear(8, 4)), PER_TENSOR, lambda: torch.randn(16, 8))


@functools.cache
def linear_program() -> ExecutorchProgram:
    """The program of ``linear``, which no test changes."""
    return to_executorch(linear(), (torch.randn(16, 8),))


def same_bits(model: nn.Module, program: ExecutorchProgram, *inputs: Tensor) -> bool:
    pairs = [pair for x in inputs for pair in zip(leaves(model(x)), leaves(program(x)), strict=True)]
    return all(torch.equal(a, b) for a, b in pairs)
