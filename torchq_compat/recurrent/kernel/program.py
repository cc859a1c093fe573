"""A converted cell as a program for the cell loop: instructions over slots of floats and integers."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from torchq_compat.capture.call_layouts import CallLayout
from torchq_compat.read.qparams import PerChannelQParams, PerTensorQParams, QParams
from torchq_compat.support.dtypes import KERNEL_DTYPES

# The instruction set of the cell loop: its operations, and the rows of numbers that represent a program.
#
# ``cell_kernels.h`` and ``cell_program.h`` declare the same: ``Op``, ``Instruction``, ``Register`` (a slot)
# and ``QParams``, each with its members in this order. ``test_instruction_set`` checks that they agree.


class Op(IntEnum):
    """The operation of an instruction."""

    LINEAR = 0
    ADD = 1
    MUL = 2
    COMPLEMENT = 3
    SIGMOID = 4
    TANH = 5
    RELU = 6
    COPY = 7


class InstructionRow(NamedTuple):
    """An instruction in ``CellProgram.table``. ``b`` is -1 if there is no second operand, ``weight`` is -1 if
    there is no weight."""

    op: int
    target: int
    a: int
    a_offset: int
    b: int
    b_offset: int
    segments: int
    units: int
    weight: int
    once: int
    quantized: int


class SlotRow(NamedTuple):
    """A slot in ``CellProgram.table``: rows of ``width`` floats, in segments of ``units``; with ``once`` the
    rows of all steps."""

    width: int
    units: int
    once: int


class QParamsRow(NamedTuple):
    """Qparams in ``CellProgram.constants``.

    A scale of 0 means no qparams, a negative scale dynamic qparams: -scale is then the smallest scale, and
    values are spread over the integers from ``quant_min`` to ``zero_point``. NaN becomes the integer ``nan``.
    """

    scale: float
    zero_point: float
    quant_min: float
    quant_max: float
    nan: float


INSTRUCTION_COLUMNS, SLOT_COLUMNS = len(InstructionRow._fields), len(SlotRow._fields)
QPARAMS_COLUMNS = len(QParamsRow._fields)


# A converted cell's q-dq graph as a program for the cell loop: instructions over slots of float rows.
#
# Slot 0 is the input, slots 1 to S are the states; each other slot is the result of an instruction. Slicing
# is not an instruction but an offset into a slot. Values that do not depend on a state are computed once
# for all steps.


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
    slots: tuple[SlotRow, ...]
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
        rows += slot
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


# The qparams of the columns of a cell's input, which the cell loop needs to read the input as integers.


#: (number of columns, their qparams or None), from the first column to the last.
ColumnQParams = tuple[tuple[int, PerTensorQParams | None], ...]


def column_qparams(qparams: QParams | None, width: int, rank: int) -> ColumnQParams:
    """Return the column qparams of a tensor with ``qparams``, ``rank`` dimensions, the last of size
    ``width``."""
    if isinstance(qparams, PerChannelQParams):
        return qparams.runs if qparams.axis == rank - 1 else ((width, None),)
    return ((width, qparams),)


def qparams_of_call(layout: CallLayout) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the args and kwargs of a call with each tensor replaced by its qparams, or None."""
    none = (None,) * layout.inputs.count()
    pairs = zip(layout.input_qparams or none, layout.float_qparams or none, strict=True)
    all_qparams = (arriving or lying_on for arriving, lying_on in pairs)
    nested: tuple[tuple[Any, ...], dict[str, Any]] = layout.inputs.put_together(
        all_qparams, itertools.repeat(None)
    )
    return nested


def as_numbers(columns: Sequence[tuple[int, PerTensorQParams | None]]) -> list[float]:
    """Return ``columns`` as the numbers that the operator reads; if some have no 8-bit qparams, all are
    floats."""
    if any(qparams is None or qparams.dtype not in KERNEL_DTYPES for _, qparams in columns):
        columns = [(sum(width for width, _ in columns), None)]
    return [number for width, qparams in columns for number in (float(width), *qparams_row(qparams))]


# The numbers that describe a module to the operator, besides its weights: programs of cells, and a boundary.
#
# They are floats, which represent every integer used here exactly; ``recurrent_operator.cpp`` reads the same
# layout.


CONSTANT_COLUMNS = 2 * QPARAMS_COLUMNS + 2
SEGMENT_COLUMNS = 1 + QPARAMS_COLUMNS


@dataclass(frozen=True)
class CellNumbers:
    """The numbers of one direction of one layer.

    Attributes:
        table, constants: see ``CellProgram``.
        masks: for each linear, the sum of 1 if it has scales, 2 if zero points, and 4 if a bias.
        segments: the qparams of its input's columns, as ``as_numbers`` returns them; empty for the first
            layer, whose columns are in the boundary.
        backward: whether it runs from the last step to the first.
    """

    table: Tensor
    constants: Tensor
    masks: tuple[int, ...]
    segments: tuple[float, ...] = ()
    backward: bool = False


@dataclass(frozen=True)
class ModuleNumbers:
    """The numbers of all cells of a module. ``layers``: the directions of each layer."""

    layers: tuple[tuple[CellNumbers, ...], ...]

    @property
    def states(self) -> int:
        """The number of states of a cell."""
        return int(self.layers[0][0].table[2])

    def tensor(self) -> Tensor:
        numbers: list[float] = [len(self.layers), len(self.layers[0]), self.states]
        for cell in (cell for layer in self.layers for cell in layer):
            instructions, slots, _, *rows = cell.table.tolist()
            numbers += [cell.backward, instructions, slots, *rows, *cell.constants.flatten().tolist()]
            numbers += [len(cell.masks), *cell.masks, len(cell.segments) // SEGMENT_COLUMNS, *cell.segments]
        return torch.tensor(numbers, dtype=torch.float64, device="cpu")

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """Return the ``ModuleNumbers`` that ``tensor()`` wrote."""
        numbers = _Numbers(tensor.tolist())
        layers, directions, states = numbers.integers(3)
        return cls(
            tuple(tuple(_read_cell(numbers, states) for _ in range(directions)) for _ in range(layers))
        )


@dataclass(frozen=True)
class Boundary:
    """The qparams of the inputs and results of a call.

    Attributes:
        columns: the qparams of the columns of x, as ``as_numbers`` returns them.
        states: for each given state, the qparams to quantize it with: none, one for all rows, or one per row.
        results: for the output and each last state, the qparams of its integers; None: floats.
    """

    columns: tuple[float, ...]
    states: tuple[tuple[QParamsRow, ...], ...]
    results: tuple[QParamsRow | None, ...]

    def numbers(self) -> list[float]:
        numbers: list[float] = [len(self.columns) // SEGMENT_COLUMNS, *self.columns]
        for rows in (*self.states, *(() if row is None else (row,) for row in self.results)):
            numbers += [len(rows), *(number for row in rows for number in row)]
        return [float(number) for number in numbers]

    @classmethod
    def of(cls, numbers: Sequence[float], states: int) -> Self:
        """Return the boundary of ``states`` states that ``numbers()`` wrote."""
        left = _Numbers(numbers)
        columns = left.take(left.integers(1)[0] * SEGMENT_COLUMNS)
        rows = [
            tuple(QParamsRow(*left.take(QPARAMS_COLUMNS)) for _ in range(left.integers(1)[0]))
            for _ in range(1 + 2 * states)
        ]
        results = tuple(row[0] if row else None for row in rows[states:])
        return cls(tuple(columns), tuple(rows[:states]), results)


def last_result_dtype(boundary: Sequence[float]) -> torch.dtype:
    """Return the dtype of the last result of a call with ``boundary``, for one state that is not given."""
    at = 1 + SEGMENT_COLUMNS * int(boundary[0])
    _, _, count, *row = boundary[at:]
    if not count:
        return torch.float32
    return torch.int8 if row[2] < 0 else torch.uint8


def floats_around(columns: Sequence[float], states: int) -> list[float]:
    """Return the boundary of a call whose states and results are floats."""
    return [float(len(columns) // SEGMENT_COLUMNS), *columns, *[0.0] * (1 + 2 * states)]


def weight_mask(parts: Sequence[object | None]) -> int:
    """Return which of scales, zero points and bias are given: 1, 2 and 4, added up."""
    return sum(1 << index for index, part in enumerate(parts) if part is not None)


class _Numbers:
    def __init__(self, numbers: Sequence[float]) -> None:
        self.left: Iterator[float] = iter(numbers)

    def take(self, count: int) -> list[float]:
        return [next(self.left) for _ in range(count)]

    def integers(self, count: int) -> list[int]:
        return [int(number) for number in self.take(count)]


def _read_cell(numbers: _Numbers, states: int) -> CellNumbers:
    backward, instructions, slots = numbers.integers(3)
    rows = numbers.integers(instructions * INSTRUCTION_COLUMNS + slots * SLOT_COLUMNS + states)
    constants = torch.tensor(numbers.take(instructions * CONSTANT_COLUMNS), dtype=torch.float64)
    masks = numbers.integers(numbers.integers(1)[0])
    segments = numbers.take(numbers.integers(1)[0] * SEGMENT_COLUMNS)
    return CellNumbers(
        torch.tensor([instructions, slots, states, *rows], dtype=torch.int64),
        constants.view(instructions, CONSTANT_COLUMNS),
        tuple(masks),
        tuple(segments),
        bool(backward),
    )
