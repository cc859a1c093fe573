"""Recurrent modules alone in a model, converted for the tests of exported programs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.ao.quantization import QConfigMapping, default_dynamic_qconfig, get_default_qconfig_mapping

import torchq_compat as tc
from tests.helpers.oracle import calibrate
from torchq_compat.model.graph_module import ConvertedGraphModule

__all__ = ["DYNAMIC", "RECURRENT", "STATIC", "Alone", "converted_alone", "converted_to_reference"]

STATIC = get_default_qconfig_mapping("qnnpack")
DYNAMIC = QConfigMapping().set_global(default_dynamic_qconfig)


class Alone(nn.Module):
    def __init__(self, recurrent: nn.Module) -> None:
        super().__init__()
        self.rnn = recurrent

    def forward(self, x: Tensor) -> Any:
        return self.rnn(x)


RECURRENT: dict[str, tuple[Callable[[], nn.Module], QConfigMapping]] = {
    "lstm": (lambda: nn.LSTM(8, 12, 2, bidirectional=True), STATIC),
    "projected": (lambda: nn.LSTM(8, 12, proj_size=5, batch_first=True), STATIC),
    "gru": (lambda: nn.GRU(8, 12, 2), STATIC),
    "bidirectional gru": (lambda: nn.GRU(8, 12, bidirectional=True), STATIC),
    "rnn": (lambda: nn.RNN(8, 12, nonlinearity="relu", bidirectional=True), STATIC),
    "forward rnn": (lambda: nn.RNN(8, 12, nonlinearity="relu"), STATIC),
    "dynamic": (lambda: nn.LSTM(8, 12, 2), DYNAMIC),
}


def converted_to_reference(model: nn.Module, mapping: QConfigMapping) -> ConvertedGraphModule:
    config = tc.get_default_prepare_custom_config()
    prepared = tc.prepare_fx(model.eval(), mapping, (torch.randn(5, 2, 8),), config)
    calibrate(prepared, [(torch.randn(10, 10, 8),)])
    return tc.convert_to_reference_fx(prepared)


@functools.cache
def converted_alone(name: str) -> ConvertedGraphModule:
    """Return a module of ``RECURRENT`` alone, as a reference model, which no test changes."""
    make, mapping = RECURRENT[name]
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return converted_to_reference(Alone(make()), mapping)
