"""A family of kernels is one file, found by its presence; no two families answer for the same calls."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from torchq_compat.lower.x86 import kernels
from torchq_compat.lower.x86.kernels.kernel_base import Family
from torchq_compat.lower.x86.plan import RULES
from torchq_compat.support.discovery import declared

SQUARE = """
import torch

from torchq_compat.lower.x86.kernels.kernel_base import Family, Refusal

FAMILY = Family({torch.ops.aten.square.default: lambda site: Refusal("a made-up kernel")})
"""


def test_a_family_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "squares.py").write_text(SQUARE)
    monkeypatch.setattr(kernels, "__path__", [*kernels.__path__, str(tmp_path)])
    try:
        found = declared(kernels, Family)
    finally:
        sys.modules.pop(f"{kernels.__name__}.squares", None)
        vars(kernels).pop("squares", None)
    (new,) = [family for family in found if family not in kernels.FAMILIES]
    assert list(new.rules) == [torch.ops.aten.square.default]
    assert torch.ops.aten.square.default not in RULES


def test_an_op_has_one_family_beside_those_asked_first() -> None:
    families = [family for family in kernels.FAMILIES if not family.goes_first]
    counted = Counter(op for family in families for op in family.rules)
    assert max(counted.values()) == 1
    assert counted.keys() == RULES.keys()
    assert len(counted) > 30
