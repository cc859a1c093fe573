"""The known differences from FX as the lists of the guide."""

from __future__ import annotations

from collections.abc import Iterable

from torchq_compat.codes import KnownDifference


def guide_list(differences: Iterable[KnownDifference]) -> str:
    """Return the list of the guide: what FX does, an arrow, what happens here."""
    return "".join(map(_entry, differences))


def _entry(difference: KnownDifference) -> str:
    anchor = f'<a id="{difference.anchor}"></a>' if difference.anchor else ""
    return f"- {anchor}**{difference.code}** {difference.fx} → {difference.here}.\n"
