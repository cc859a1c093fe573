"""A converted cell's q-dq graph as a program for the cell loop: instructions over slots of float rows.

Slot 0 is the input, slots 1 to S are the states, every other slot is what an instruction writes. Slicing is
no instruction but an offset into a slot. What does not depend on a state is computed once for all
steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from torchq_compat.specs.grids import PerTensorGrid

__all__ = [
    "INSTRUCTION_COLUMNS",
    "SLOT_COLUMNS",
    "CellProgram",
    "DynamicGrid",
    "Instruction",
    "Op",
    "Slot",
    "WeightNames",
    "grid_row",
]

#: Numbers of an instruction and of a slot in ``CellProgram.table``.
INSTRUCTION_COLUMNS, SLOT_COLUMNS = 11, 3


class Op(IntEnum):
    """What an instruction computes; the kernel has the same order."""

    LINEAR = 0
    ADD = 1
    MUL = 2
    COMPLEMENT = 3
    SIGMOID = 4
    TANH = 5
    RELU = 6
    COPY = 7


@dataclass(frozen=True)
class DynamicGrid:
    """A grid chosen from the values that are put on it.

    Attributes:
        eps: the smallest scale.
        chosen_max: the largest integer of those that the values are spread over, from ``quant_min`` on.
        quant_min, quant_max, dtype: the integers it saturates to.
    """

    eps: float
    chosen_max: int
    quant_min: int
    quant_max: int
    dtype: torch.dtype


class WeightNames(NamedTuple):
    """A linear's int8 weight (N, K): attribute names in the cell. Without ``scales`` it is per tensor."""

    values: str
    scales: str | None
    zero_points: str | None
    bias: str | None


@dataclass(frozen=True)
class Slot:
    """Rows of ``width`` floats, in segments of ``units``; ``once``: of all steps."""

    width: int
    units: int
    once: bool


@dataclass(frozen=True)
class Instruction:
    """One operation on whole rows.

    Attributes:
        target: the slot it writes, of the operation's width.
        sources: (slot, first column) of each operand.
        units: how many columns belong to one gate.
        weight: index of a linear's weight.
        output: the grid its result is put on; None: floats.
        input: the grid a linear reads its input on; None: on none, or the input of the cell, whose grids
            the caller knows.
        weight_qparams: scale and zero point of a weight quantized per tensor.
    """

    op: Op
    target: int
    sources: tuple[tuple[int, int], ...]
    width: int
    units: int
    once: bool
    weight: int = -1
    output: PerTensorGrid | None = None
    input: PerTensorGrid | DynamicGrid | None = None
    weight_qparams: tuple[float, int] = (1.0, 0)


@dataclass(frozen=True)
class CellProgram:
    """A cell as instructions. ``results``: the slot of every new state."""

    instructions: tuple[Instruction, ...]
    slots: tuple[Slot, ...]
    results: tuple[int, ...]
    weights: tuple[WeightNames, ...]
    table: Tensor = field(init=False, compare=False)
    constants: Tensor = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", _table(self))
        object.__setattr__(self, "constants", _constants(self.instructions))


def _table(program: CellProgram) -> Tensor:
    """int64: the counts of instructions, slots and states, then a row for each; the layout of the kernel."""
    rows = [len(program.instructions), len(program.slots), len(program.results)]
    for i in program.instructions:
        (a, b) = (*i.sources, (-1, 0))[:2]
        rows += [i.op, i.target, *a, *b, i.width // i.units, i.units, i.weight, i.once, i.output is not None]
    for slot in program.slots:
        rows += [slot.width, slot.units, slot.once]
    return torch.tensor([*rows, *program.results], dtype=torch.int64, device="cpu")


def _constants(instructions: tuple[Instruction, ...]) -> Tensor:
    """float64 (instructions, 10): the output's and the input's grid, the weight's scale and zero point."""
    rows = [[*grid_row(i.output), *grid_row(i.input), *i.weight_qparams] for i in instructions]
    return torch.tensor(rows, dtype=torch.float64, device="cpu")


def grid_row(grid: PerTensorGrid | DynamicGrid | None) -> tuple[float, float, float, float]:
    """Scale, zero point and range; a scale of zero stands for no grid, a negative one for a dynamic grid."""
    if grid is None:
        return 0.0, 0.0, 0.0, 0.0
    if isinstance(grid, DynamicGrid):
        return -grid.eps, float(grid.chosen_max), float(grid.quant_min), float(grid.quant_max)
    return grid.scale, float(grid.zero_point), float(grid.quant_min), float(grid.quant_max)
