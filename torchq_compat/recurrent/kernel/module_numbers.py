"""The numbers that describe a module to the operator, besides its weights: programs of cells, and a boundary.

They are floats, which represent every integer used here exactly; ``recurrent_operator.cpp`` reads the same
layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from torchq_compat.recurrent.kernel import program

CONSTANT_COLUMNS = 2 * program.QPARAMS_COLUMNS + 2
SEGMENT_COLUMNS = 1 + program.QPARAMS_COLUMNS


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
    states: tuple[tuple[program.QParamsRow, ...], ...]
    results: tuple[program.QParamsRow | None, ...]

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
            tuple(program.QParamsRow(*left.take(program.QPARAMS_COLUMNS)) for _ in range(left.integers(1)[0]))
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
    rows = numbers.integers(
        instructions * program.INSTRUCTION_COLUMNS + slots * program.SLOT_COLUMNS + states
    )
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
