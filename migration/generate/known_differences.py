"""The known differences from FX as the table of the guide."""

from __future__ import annotations

from collections.abc import Iterable

from torchq_compat.codes import KnownDifference


def guide_table(differences: Iterable[KnownDifference]) -> str:
    """Return the table of the guide."""
    return "".join(["| code | FX | here |\n|---|---|---|\n", *map(_row, differences)])


def _row(difference: KnownDifference) -> str:
    anchor = f'<a id="{difference.anchor}"></a>' if difference.anchor else ""
    return f"| {anchor}{difference.code} | {difference.fx} | {difference.here} |\n"
