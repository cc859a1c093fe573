"""All constructs that ``scan`` finds, by code: those of the rewrites, then those for manual review."""

from __future__ import annotations

from collections.abc import Iterable

from torchq_compat.migrate.legacy_api.construct import Construct
from torchq_compat.migrate.manual_review import MANUAL_REVIEWS
from torchq_compat.migrate.rewrites import REWRITES

__all__ = ["CONSTRUCTS", "RETIRED"]


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

#: Codes that findings no longer have, but that occur in old logs.
RETIRED = _by_code(
    [
        Construct(
            "TQ110",
            "TorchScript",
            "nothing: it stays as it is",
            "`torch.jit.script` and `torch.jit.trace` take what `convert_fx` returns, and `torch.jit.save` "
            "writes it;\n`torch.export` is the way that PyTorch goes on with.",
        )
    ]
)
