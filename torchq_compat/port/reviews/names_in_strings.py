"""Find legacy names in string literals."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from torchq_compat.port.constructs import Site
from torchq_compat.port.finders import Finder
from torchq_compat.port.source.moved_tables import LEGACY_MODULES, LEGACY_NAMES
from torchq_compat.port.source.parsed import ParsedSource


def find(source: ParsedSource) -> Iterator[Site]:
    for string in source.nodes(cst.SimpleString):
        if string.raw_value in LEGACY_NAMES | LEGACY_MODULES:
            refusal = "a name in a text: only its user knows what it is for"
            yield Site("TQ204", source.start(string), source.code(string), refusal=refusal)


REVIEW = Finder("TQ204", find)
