"""Find ``_equalization_config``, which has no counterpart."""

from __future__ import annotations

from collections.abc import Iterator

from torchq_compat.port.constructs import Site
from torchq_compat.port.finders import Finder
from torchq_compat.port.legacy_api.fx_calls import fx_calls
from torchq_compat.port.source.parsed import ParsedSource

REFUSAL = "PT2E has none; equalize the float model before, as the guide shows"


def find(source: ParsedSource) -> Iterator[Site]:
    for call in fx_calls(source):
        arg = call.arg("_equalization_config")
        if arg is not None and source.code(arg.value) != "None":
            yield Site("TQ202", source.start(arg), source.code(arg), refusal=REFUSAL)


REVIEW = Finder("TQ202", find)
