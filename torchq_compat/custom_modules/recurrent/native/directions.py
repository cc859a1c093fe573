"""Runs one direction over time in the cell loop: in one call, where ``over_time`` runs step by step."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import Tensor, nn

from torchq_compat.custom_modules.recurrent.native.bound_module import OwnedProgram
from torchq_compat.custom_modules.recurrent.native.columns import ColumnQParams, as_numbers
from torchq_compat.custom_modules.recurrent.native.module_numbers import (
    CellNumbers,
    ModuleNumbers,
    floats_around,
    weight_mask,
)
from torchq_compat.custom_modules.recurrent.native.op import recurrent

__all__ = ["run_native_direction"]

State = tuple[Tensor, ...]


def run_native_direction(
    owned: OwnedProgram,
    x: Tensor,
    state: State,
    columns: ColumnQParams,
    *,
    backward: bool,
    batch_sizes: Sequence[int] = (),
) -> tuple[Tensor, State]:
    """Run one direction: ``x`` (T, B, I), or packed rows with ``batch_sizes``, and states (B, width) ->
    (T, B, P) and the last states.

    It is for modules of which some directions run in Python, and binds nothing.
    """
    program = owned.program
    masks = tuple(weight_mask(names[1:]) for names in program.weights)
    numbers = CellNumbers(program.table, program.constants, masks, backward=backward)
    output, *last = recurrent(
        x,
        [each[None] for each in state],
        [_attribute(owned.owner, name) for names in program.weights for name in names if name is not None],
        ModuleNumbers(((numbers,),)).tensor(),
        floats_around(as_numbers(columns), len(state)),
        batch_sizes=batch_sizes,
    )
    return output, tuple(each[0] for each in last)


def _attribute(owner: nn.Module, name: str) -> Tensor:
    value: Tensor = operator.attrgetter(name)(owner)
    return value
