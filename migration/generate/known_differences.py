"""Read ``known_differences.toml``, the list of what FX does and what this package does instead."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class KnownDifference(NamedTuple):
    """One row.

    Attributes:
        fx: what FX does.
        here: what this package does.
        test: the file that asserts both.
        anchor: its place in the guide, if ``compare`` points there.
    """

    fx: str
    here: str
    test: str
    anchor: str = ""


def read_known_differences(file: Path) -> tuple[KnownDifference, ...]:
    """Read the ``[[known]]`` entries of ``file``.

    Raises:
        TypeError: an entry lacks a field or has an unknown one.
    """
    return tuple(KnownDifference(**entry) for entry in tomllib.loads(file.read_text())["known"])


def guide_table(differences: tuple[KnownDifference, ...]) -> str:
    """Return the table of the guide."""
    return "".join(["| FX | here | test |\n|---|---|---|\n", *map(_row, differences)])


def _row(difference: KnownDifference) -> str:
    anchor = f'<a id="{difference.anchor}"></a>' if difference.anchor else ""
    return f"| {anchor}{difference.fx} | {difference.here} | `{difference.test}` |\n"


def changelog_list(differences: tuple[KnownDifference, ...]) -> str:
    """Return the list of the changelog: what FX does, and what this package does."""
    return "".join(_entries(differences))


def _entries(differences: tuple[KnownDifference, ...]) -> Iterator[str]:
    for difference in differences:
        yield f"- FX: {difference.fx}. Here: {difference.here}.\n"
