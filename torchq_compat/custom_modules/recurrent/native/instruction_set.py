"""The instruction set of the cell loop: its operations, and the rows of numbers that represent a program.

``cell_kernels.h`` and ``cell_program.h`` declare the same: ``Op``, ``Instruction``, ``Register`` (a slot) and
``QParams``, each with its members in this order. ``test_instruction_set`` checks that they agree.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

__all__ = [
    "INSTRUCTION_COLUMNS",
    "QPARAMS_COLUMNS",
    "SLOT_COLUMNS",
    "InstructionRow",
    "Op",
    "QParamsRow",
    "SlotRow",
]


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
    """A slot in ``CellProgram.table``."""

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
