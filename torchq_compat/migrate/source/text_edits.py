"""Edits of a text at byte offsets; bytes that are not edited are kept."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["Edit", "apply_edits", "overlap"]


class Edit(NamedTuple):
    """Replace the bytes from ``start`` up to ``end`` by ``text``."""

    start: int
    end: int
    text: str


def apply_edits(data: bytes, edits: Iterable[Edit]) -> bytes:
    """Return ``data`` after the edits, which must not overlap; equal edits are applied once."""
    pieces, position = [], 0
    for edit in sorted(set(edits)):
        if edit.start < position:
            raise ValueError(f"edits overlap at byte {edit.start}")
        pieces += [data[position : edit.start], edit.text.encode()]
        position = edit.end
    return b"".join([*pieces, data[position:]])


def overlap(first: Iterable[Edit], second: Iterable[Edit]) -> bool:
    """Return whether an edit of ``first`` and a different edit of ``second`` touch the same bytes."""
    others = list(second)
    return any(a != b and a.start < b.end and b.start < a.end for a in first for b in others)
