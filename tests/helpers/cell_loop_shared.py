"""Helpers shared by tests of the cell loop: qparams, inputs and native calls of converted cells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn

from tests.helpers.lstm_flow import uniform
from torchq_compat.read.qparams import PerTensorQParams
from torchq_compat.recurrent.cell_graph import ConvertedCellGraphModule
from torchq_compat.recurrent.kernel.direct_calls import BoundDirection
from torchq_compat.recurrent.kernel.op import recurrent
from torchq_compat.recurrent.kernel.program import (
    CellNumbers,
    ModuleNumbers,
    as_numbers,
    column_qparams,
    floats_around,
    weight_mask,
)

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
    bound = BoundDirection(program, cell, cell, cell.program)
    backward = options.pop("backward", False)
    numbers = CellNumbers(program.table, program.constants, bound.masks, backward=backward)
    output, *last = recurrent(
        x,
        [entry[None] for entry in states],
        [attribute(cell, name) for name in bound.names],
        ModuleNumbers(((numbers,),)).tensor(),
        floats_around(as_numbers(columns), len(states)),
    )
    return output, tuple(item[0] for item in last)


def attribute(cell: nn.Module, name: str) -> Tensor:
    value: Any = cell
    for part in name.split("."):
        value = getattr(value, part)
    assert isinstance(value, Tensor)
    return value


def cell_loop(
    x: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor | None],
    table: Tensor,
    constants: Tensor,
    input_qparams: Sequence[float],
    *,
    backward: bool,
) -> tuple[Tensor, list[Tensor]]:
    """Run one direction of one layer of a converted recurrent module as one call of the operator.

    Args:
        x, states, weights, table, constants, backward: as ``run_interpreted`` takes them.
        input_qparams: (columns, scale, zero point, quant_min, quant_max, integer of NaN) of each group of
            columns of ``x``, one after the other; a scale of 0: x has no 8-bit qparams.

    Returns:
        The hidden states of all steps (T, B, width) and the last states, which are ``states`` if there are no
        steps.
    """
    masks = tuple(weight_mask(weights[at + 1 : at + 4]) for at in range(0, len(weights), 4))
    numbers = ModuleNumbers(((CellNumbers(table, constants, masks, backward=backward),),))
    output, *last = recurrent(
        x,
        [state[None] for state in states],
        [weight for weight in weights if weight is not None],
        numbers.tensor(),
        floats_around(list(input_qparams) or [x.shape[-1], *[0.0] * 5], len(states)),
    )
    return output, [state[0] for state in last]
