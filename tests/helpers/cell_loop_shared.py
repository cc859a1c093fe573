"""Helpers shared by tests of the cell loop: qparams, inputs and native calls of converted cells."""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn

from tests.helpers.lstm_flow import uniform
from torchq_compat.read.qparams import PerTensorQParams
from torchq_compat.recurrent.cell_graph import ConvertedCellGraphModule
from torchq_compat.recurrent.kernel.bound_module import OwnedProgram, run_native_direction
from torchq_compat.recurrent.kernel.program import column_qparams

#: The qparams of ``x``, as if from a quantized layer in front.
X_QPARAMS = PerTensorQParams(2 / 255, 128, 0, 255, torch.uint8)


def on(qparams: PerTensorQParams, x: Tensor) -> Tensor:
    return qparams.dequantize(qparams.quantize(x))


def inputs_of(
    cell: ConvertedCellGraphModule,
    steps: int,
    batch: int,
    *,
    qparams: PerTensorQParams = X_QPARAMS,
    zeros: bool = False,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return x (T, B, I) with ``qparams`` and states (B, width) with the qparams of the cell."""
    widths = [int(n.meta["val"].shape[1]) for n in cell.graph.nodes if n.op == "placeholder"]
    states = (uniform(0.9, batch, width) for width in widths[1:])
    all_qparams = cell.state_qparams()
    return on(qparams, uniform(2.0, steps, batch, widths[0])), tuple(map(on, all_qparams, states))


def native(
    cell: ConvertedCellGraphModule, x: Tensor, states: tuple[Tensor, ...], **options: Any
) -> tuple[Tensor, tuple[Tensor, ...]]:
    columns = options.pop("columns", column_qparams(X_QPARAMS, x.shape[-1], x.dim()))
    program = cell.program()
    assert program is not None
    owned = OwnedProgram(cell, program)
    return run_native_direction(owned, x, states, columns, backward=options.pop("backward", False))


def attribute(cell: nn.Module, name: str) -> Tensor:
    value: Any = cell
    for part in name.split("."):
        value = getattr(value, part)
    assert isinstance(value, Tensor)
    return value
