"""One direction over time in the cell loop: what ``over_time`` does step by step, in one call."""

from __future__ import annotations

import itertools
import operator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchq_compat.custom_modules.recurrent.native.columns import ColumnQParams, as_numbers
from torchq_compat.custom_modules.recurrent.native.op import cell_loop
from torchq_compat.custom_modules.recurrent.native.program import CellProgram

__all__ = ["OwnedProgram", "run_native_direction", "run_native_packed_direction"]

State = tuple[Tensor, ...]


class OwnedProgram(NamedTuple):
    """A program, and the module whose attributes its weights are."""

    owner: nn.Module
    program: CellProgram


def run_native_direction(
    owned: OwnedProgram, x: Tensor, state: State, columns: ColumnQParams, *, backward: bool
) -> tuple[Tensor, State]:
    """Return ``x`` (T, B, I), states (B, width) -> (T, B, P) and the last states."""
    owner, program = owned
    weights = [_attribute(owner, name) for names in program.weights for name in names]
    output, last = cell_loop(
        x, list(state), weights, program.table, program.constants, as_numbers(columns), backward=backward
    )
    return output, tuple(last)


def run_native_packed_direction(
    owned: OwnedProgram,
    x: Tensor,
    state: State,
    batch_sizes: list[int],
    columns: ColumnQParams,
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
        output, last = run_native_direction(owned, shaped, active, columns, backward=backward)
        state = tuple(torch.cat([now, each[size:]]) for now, each in zip(last, state, strict=True))
        outputs.append(output.flatten(0, 1))
    return torch.cat(outputs[::-1] if backward else outputs), state


def _attribute(owner: nn.Module, name: str | None) -> Tensor | None:
    if name is None:
        return None
    value: Tensor = operator.attrgetter(name)(owner)
    return value
