"""Converted models with recurrent modules, and their cells, shared by several tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.ao.quantization import FixedQParamsObserver, get_default_qconfig

from tests.helpers.lstm_flow import uniform
from tests.helpers.once import made_once
from torchq_compat.nn import quantized
from torchq_compat.recurrent.cell_graph import ConvertedCellGraphModule
from torchq_compat.recurrent_parts import get_individually_observed_parts

SIXTEEN_BITS = FixedQParamsObserver.with_args(
    scale=2.0**-11, zero_point=2**15, dtype=torch.qint32, quant_min=0, quant_max=2**16 - 1
)


KINDS: dict[str, tuple[Callable[[], nn.RNNBase], dict[str, Any]]] = {
    "lstm": (lambda: nn.LSTM(8, 12, 2, bidirectional=True), {}),
    "split lstm": (lambda: nn.LSTM(8, 12), {"split_gates": True}),
    "projected lstm": (lambda: nn.LSTM(8, 12, proj_size=5, bias=False), {}),
    "16-bit lstm": (lambda: nn.LSTM(8, 12), {"igates_obs_ctr": SIXTEEN_BITS, "hgates_obs_ctr": SIXTEEN_BITS}),
    "gru": (lambda: nn.GRU(8, 12, 2), {}),
    "split gru": (lambda: nn.GRU(8, 12, bidirectional=True), {"split_gates": True}),
    "rnn": (lambda: nn.RNN(8, 12), {}),
    "relu rnn": (lambda: nn.RNN(8, 12, nonlinearity="relu"), {}),
}


@made_once
def converted(name: str, *, seed: int = 0, gain: float = 1.0) -> nn.Module:
    torch.manual_seed(seed)
    make, options = KINDS[name]
    module = make().eval()
    module.qconfig = get_default_qconfig("qnnpack")
    observed = get_individually_observed_parts(module, **options)
    with torch.no_grad():
        observed(uniform(gain, 9, 16, 8))
    return getattr(quantized, type(module).__name__).from_observed(observed)


def cells_of(module: Any) -> list[ConvertedCellGraphModule]:
    return [cell for _, cell in module.cells()]
