"""Every construct that ``scan`` finds, by its code: those of the rewrites, then those for manual review."""

from __future__ import annotations

from collections.abc import Iterable

from torchq_compat.migrate.legacy_api.construct import Construct
from torchq_compat.migrate.manual_review import MANUAL_REVIEWS
from torchq_compat.migrate.rewrites import REWRITES

__all__ = ["CONSTRUCTS"]


def _by_code(constructs: Iterable[Construct]) -> dict[str, Construct]:
    codes: dict[str, Construct] = {}
    for construct in sorted(constructs):
        if construct.code in codes:
            raise ValueError(f"two declarations have the code {construct.code}")
        codes[construct.code] = construct
    return codes


CONSTRUCTS = _by_code(
    [*(rewrite.construct for rewrite in REWRITES), *(review.construct for review in MANUAL_REVIEWS)]
)
