"""The instruction set of the native loop: defined in Python, compared with the C++ that reads its rows."""

from __future__ import annotations

import re

import pytest

from torchq_compat.recurrent.kernel.build import HEADERS, SOURCE
from torchq_compat.recurrent.kernel.interpreter import ELEMENTWISE
from torchq_compat.recurrent.kernel.program import InstructionRow, Op, QParamsRow, SlotRow

TEXT = "\n".join(file.read_text() for file in (SOURCE, *HEADERS))


def test_the_operations_have_the_same_numbers() -> None:
    declared = re.findall(r"enum Op : int64_t \{([^}]*)\}", TEXT)
    assert len(declared) == 1
    # C++ enumerators without explicit values count from zero.
    names = [name.strip() for name in declared[0].split(",")]
    assert [f"k{op.name.title()}" for op in sorted(Op)] == names
    assert sorted(Op) == list(range(len(names)))


def test_every_operation_is_computed_by_both() -> None:
    assert {Op.LINEAR, *ELEMENTWISE} == set(Op)
    for op in Op:
        assert re.search(rf"(==|!=) k{op.name.title()}\b", TEXT) or op is Op.COPY, op


@pytest.mark.parametrize(
    ("struct", "number", "row"),
    [
        ("Instruction", "int64_t", InstructionRow),
        ("Register", "int64_t", SlotRow),
        ("QParams", "double", QParamsRow),
    ],
)
def test_the_rows_have_the_same_members(struct: str, number: str, row: type[tuple[int, ...]]) -> None:
    declared = re.findall(rf"struct {struct} \{{\n  {number} ([^;]*);\n", TEXT)
    assert [each.replace(" ", "").split(",") for each in declared] == [list(row._fields)]  # type: ignore[attr-defined]
