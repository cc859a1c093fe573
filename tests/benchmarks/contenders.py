"""The contenders for latency, size and accuracy of a converted model."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.benchmarks.cases import Case

__all__ = ["FEEDFORWARD_CONTENDERS", "RECURRENT_CONTENDERS", "Built", "Contender", "UnavailableError"]


class UnavailableError(Exception):
    """A contender cannot be built; the message says why, for the table."""


@dataclass(frozen=True)
class Built:
    """A model to call with the inputs of its case, and the bytes of its weights as they are saved."""

    run: Callable[..., Any]
    size: int


@dataclass(frozen=True)
class Contender:
    """One way to run a model.

    Attributes:
        is_ours: made by this package.
        is_quantized: whether it has to differ from the float model.
    """

    name: str
    build: Callable[[Case], Built]
    is_ours: bool = False
    is_quantized: bool = True


def _float(case: Case) -> Built:
    return Built(case.model, _saved_size(case.model))


def _dynamic(case: Case) -> Built:
    quantized = torch.ao.quantization.quantize_dynamic(copy.deepcopy(case.model), {nn.LSTM}, torch.qint8)
    return Built(quantized, _saved_size(quantized))


def _fx(case: Case) -> Built:
    quantized = case.lowered_by_fx()
    return Built(quantized, _saved_size(quantized))


def _reference(case: Case) -> Built:
    return Built(case.reference, _saved_size(case.reference))


def _lowered(case: Case) -> Built:
    return Built(_really_lowered(case), _saved_size(case.lowered))


def _reference_compiled(case: Case) -> Built:
    return Built(_compiled(case.reference), _saved_size(case.reference))


def _lowered_compiled(case: Case) -> Built:
    return Built(_compiled(_really_lowered(case)), _saved_size(case.lowered))


def _compiled(model: nn.Module) -> Callable[..., Any]:
    # What another case compiled would count against dynamo's limit of recompilations.
    torch._dynamo.reset()
    compiled: Callable[..., Any] = torch.compile(copy.deepcopy(model))
    return compiled


def _really_lowered(case: Case) -> nn.Module:
    if not hasattr(case.lowered, "reference"):
        raise UnavailableError("convert_fx gives the reference graph")
    return case.lowered


def _saved_size(model: nn.Module) -> int:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return file.tell()


FLOAT = Contender("float", _float, is_quantized=False)
DYNAMIC = Contender("dynamic quantized", _dynamic)
FX = Contender("FX static", _fx)
OURS = (
    Contender("ours, reference", _reference, is_ours=True),
    Contender("ours, lowered", _lowered, is_ours=True),
    Contender("ours, reference compiled", _reference_compiled, is_ours=True),
    Contender("ours, lowered compiled", _lowered_compiled, is_ours=True),
)
RECURRENT_CONTENDERS = (FLOAT, DYNAMIC, FX, *OURS)
FEEDFORWARD_CONTENDERS = (FLOAT, FX, *OURS)
