"""A family of rules is one file, found by its presence; ops without one are tables, moves or floats."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from torchq_compat.lower.integers import rules
from torchq_compat.lower.integers.lowered_graph import Family
from torchq_compat.support.discovery import declared

ROLL = """
import torch

from torchq_compat.lower.integers.lowered_graph import Family, Refusal

FAMILY = Family({torch.ops.aten.roll.default: lambda site: Refusal("a made-up kernel")})
"""


def test_a_family_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rolls.py").write_text(ROLL)
    monkeypatch.setattr(rules, "__path__", [*rules.__path__, str(tmp_path)])
    try:
        found = declared(rules, Family)
    finally:
        sys.modules.pop(f"{rules.__name__}.rolls", None)
        vars(rules).pop("rolls", None)
    (new,) = [family for family in found if family not in rules.FAMILIES]
    assert list(new.rules) == [torch.ops.aten.roll.default]


def test_the_families_are_few() -> None:
    covered = {op for family in rules.FAMILIES for op in family.rules}
    assert torch.ops.aten.linear.default in covered
    assert torch.ops.aten.hardswish.default not in covered  # A table, as every op on values by themselves.
    assert torch.ops.aten.transpose.int not in covered
