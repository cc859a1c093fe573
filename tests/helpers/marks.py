"""Marks of parametrized tests."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

__all__ = ["slow_but"]


def slow_but(quick: Collection[str], names: Iterable[str]) -> list[Any]:
    """Return test parameters of which only ``quick`` are in the default run; the others run the same code."""
    names = list(names)
    assert set(quick) <= set(names), quick
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow, id=name) for name in names]
