"""Find ``_equalization_config``, which has no counterpart."""

from __future__ import annotations

from collections.abc import Iterator

from torchq_compat.port.constructs import Construct, Site
from torchq_compat.port.legacy_api.fx_calls import fx_calls
from torchq_compat.port.reviews.review import ManualReview
from torchq_compat.port.source.parsed import ParsedSource


def find(source: ParsedSource) -> Iterator[Site]:
    for call in fx_calls(source):
        arg = call.arg("_equalization_config")
        if arg is not None and source.code(arg.value) != "None":
            yield Site("TQ202", source.start(arg), source.code(arg), refusal="PT2E has no equalization")


CONSTRUCT = Construct(
    code="TQ202",
    title="equalization",
    becomes="nothing: PT2E has none; use per-channel weights",
    guide="""\
`_equalization_config` has no counterpart in PT2E; per-channel weights give most of its gain.
""",
)

REVIEW = ManualReview(CONSTRUCT, find)
