"""The instruction set of the cell loop: its operations, and the rows of numbers a program is handed over as.

``cell_kernels.h`` and ``cell_program.h`` declare the same: ``Op``, ``Instruction``, ``Register`` (a slot) and
``QParams``, each with its members in this order. ``test_instruction_set`` holds the two together.
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
    """What an instruction computes."""

    LINEAR = 0
    ADD = 1
    MUL = 2
    COMPLEMENT = 3
    SIGMOID = 4
    TANH = 5
    RELU = 6
    COPY = 7


class InstructionRow(NamedTuple):
    """An instruction in ``CellProgram.table``. ``b`` is -1 where there is no second operand, ``weight`` where
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

    A scale of 0 stands for none, a negative one for dynamic qparams: -scale is the smallest scale, and values
    are spread over the integers from ``quant_min`` to ``zero_point``. ``nan`` is the integer NaN becomes.
    """

    scale: float
    zero_point: float
    quant_min: float
    quant_max: float
    nan: float


INSTRUCTION_COLUMNS, SLOT_COLUMNS = len(InstructionRow._fields), len(SlotRow._fields)
QPARAMS_COLUMNS = len(QParamsRow._fields)
