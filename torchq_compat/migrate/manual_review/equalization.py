"""Find ``_equalization_config``, which has no counterpart."""

from __future__ import annotations

from collections.abc import Iterator

from torchq_compat.migrate.legacy_api.construct import Construct
from torchq_compat.migrate.legacy_api.fx_calls import fx_calls
from torchq_compat.migrate.manual_review.review import ManualReview
from torchq_compat.migrate.source.parsed_source import ParsedSource
from torchq_compat.migrate.source.sites import Site

__all__ = ["REVIEW"]


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
