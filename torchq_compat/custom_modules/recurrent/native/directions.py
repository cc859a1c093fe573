"""One direction over time in the cell loop: what ``over_time`` does step by step, in one call."""

from __future__ import annotations

import itertools
import operator

import torch
from torch import Tensor
from torch.fx import GraphModule

from torchq_compat.custom_modules.recurrent.native.columns import ColumnGrids, as_numbers
from torchq_compat.custom_modules.recurrent.native.op import cell_loop
from torchq_compat.custom_modules.recurrent.native.program import CellProgram

__all__ = ["run_native_direction", "run_native_packed_direction"]

State = tuple[Tensor, ...]


def run_native_direction(
    cell: GraphModule, program: CellProgram, x: Tensor, state: State, columns: ColumnGrids, *, backward: bool
) -> tuple[Tensor, State]:
    """``x`` (T, B, I), states (B, width) -> (T, B, P) and the last states."""
    weights = [_attribute(cell, name) for names in program.weights for name in names]
    output, last = cell_loop(
        x, list(state), weights, program.table, program.constants, as_numbers(columns), backward=backward
    )
    return output, tuple(last)


def run_native_packed_direction(
    cell: GraphModule,
    program: CellProgram,
    x: Tensor,
    state: State,
    batch_sizes: list[int],
    columns: ColumnGrids,
    *,
    backward: bool,
) -> tuple[Tensor, State]:
    """As ``over_time.run_packed_direction``: one call for all steps of the same batch size."""
    sizes = [(size, len(list(steps))) for size, steps in itertools.groupby(batch_sizes)]
    rows = torch.split(x, [size * steps for size, steps in sizes])
    outputs = []
    parts = list(zip(sizes, rows, strict=True))
    for (size, steps), part in reversed(parts) if backward else parts:
        active = tuple(each[:size] for each in state)
        shaped = part.view(steps, size, x.shape[-1])
        output, last = run_native_direction(cell, program, shaped, active, columns, backward=backward)
        state = tuple(torch.cat([now, each[size:]]) for now, each in zip(last, state, strict=True))
        outputs.append(output.flatten(0, 1))
    return torch.cat(outputs[::-1] if backward else outputs), state


def _attribute(cell: GraphModule, name: str | None) -> Tensor | None:
    if name is None:
        return None
    value: Tensor = operator.attrgetter(name)(cell)
    return value
