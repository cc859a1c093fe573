"""A converted cell's q-dq graph as a program for the cell loop: instructions over slots of float rows.

Slot 0 is the input, slots 1 to S are the states; each other slot is the result of an instruction. Slicing is
not an instruction but an offset into a slot. Values that do not depend on a state are computed once for all
steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from torchq_compat.custom_modules.recurrent.native.instruction_set import (
    InstructionRow,
    Op,
    QParamsRow,
    SlotRow,
)
from torchq_compat.qspecs.qparams import PerTensorQParams

__all__ = [
    "CellProgram",
    "DynamicQParams",
    "Instruction",
    "Slot",
    "WeightNames",
    "qparams_row",
]

#: The integers that a conversion on this machine gives for NaN, which C++ leaves undefined.
NAN_INTEGERS = {
    dtype: float(torch.tensor(math.nan, device="cpu").to(dtype))
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32)
}


@dataclass(frozen=True)
class DynamicQParams:
    """QParams chosen from the values that are quantized with them.

    Attributes:
        eps: the smallest scale.
        chosen_max: the values are spread over the integers from ``quant_min`` to ``chosen_max``.
        quant_min, quant_max, dtype: the range and dtype that integers saturate to.
    """

    eps: float
    chosen_max: int
    quant_min: int
    quant_max: int
    dtype: torch.dtype


class WeightNames(NamedTuple):
    """The attribute names of a linear's int8 weight (N, K) in the cell; per tensor without ``scales``."""

    values: str
    scales: str | None
    zero_points: str | None
    bias: str | None


@dataclass(frozen=True)
class Slot:
    """Rows of ``width`` floats, in segments of ``units``; with ``once`` the rows of all steps."""

    width: int
    units: int
    once: bool


@dataclass(frozen=True)
class Instruction:
    """One operation on whole rows.

    Attributes:
        target: the slot it writes, which has the operation's width.
        sources: (slot, first column) of each operand.
        units: the number of columns that belong to one gate.
        weight: index of a linear's weight.
        output: the qparams its result is quantized with; None: floats.
        input: the qparams a linear reads its input with; None: floats, or the input of the cell, whose
            qparams the caller knows.
        weight_qparams: scale and zero point of a weight quantized per tensor.
    """

    op: Op
    target: int
    sources: tuple[tuple[int, int], ...]
    width: int
    units: int
    once: bool
    weight: int = -1
    output: PerTensorQParams | None = None
    input: PerTensorQParams | DynamicQParams | None = None
    weight_qparams: tuple[float, int] = (1.0, 0)


@dataclass(frozen=True)
class CellProgram:
    """A cell as instructions. ``results`` are the slots of the new states."""

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
    """Return the kernel's table, int64: the numbers of instructions, slots and states, then their rows."""
    rows = [len(program.instructions), len(program.slots), len(program.results)]
    for i in program.instructions:
        (a, b) = (*i.sources, (-1, 0))[:2]
        segments, quantized = i.width // i.units, i.output is not None
        rows += InstructionRow(i.op, i.target, *a, *b, segments, i.units, i.weight, i.once, quantized)
    for slot in program.slots:
        rows += SlotRow(slot.width, slot.units, slot.once)
    return torch.tensor([*rows, *program.results], dtype=torch.int64, device="cpu")


def _constants(instructions: tuple[Instruction, ...]) -> Tensor:
    """Return float64 (instructions, 12): qparams of output and input, scale and zero point of the weight."""
    rows = [[*qparams_row(i.output), *qparams_row(i.input), *i.weight_qparams] for i in instructions]
    return torch.tensor(rows, dtype=torch.float64, device="cpu")


def qparams_row(qparams: PerTensorQParams | DynamicQParams | None) -> QParamsRow:
    """Return ``qparams`` as a row of numbers."""
    if qparams is None:
        return QParamsRow(0.0, 0.0, 0.0, 0.0, 0.0)
    limits = float(qparams.quant_min), float(qparams.quant_max), NAN_INTEGERS.get(qparams.dtype, 0.0)
    if isinstance(qparams, DynamicQParams):
        return QParamsRow(-qparams.eps, float(qparams.chosen_max), *limits)
    return QParamsRow(qparams.scale, float(qparams.zero_point), *limits)
