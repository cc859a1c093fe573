"""Rewrite the functions of ``torch.ao.quantization.quantize_fx``, however imported, to
``torchq_compat.quantize_fx``."""

from __future__ import annotations

from collections.abc import Iterator

from torchq_compat.port.constructs import Site
from torchq_compat.port.finders import Finder
from torchq_compat.port.legacy_api.moved_names import MovedNames
from torchq_compat.port.source.moved_tables import FUNCTIONS, MOVED_FUNCTIONS
from torchq_compat.port.source.parsed import ParsedSource

ROWS = tuple(row for row in MOVED_FUNCTIONS if row.replacement == "torchq_compat.quantize_fx")
#: These names never were here, but a docstring of FX says so, and scripts copy it.
PACKAGES = frozenset(row.legacy.rpartition(".")[0] for row in ROWS)


def find(source: ParsedSource) -> Iterator[Site]:
    yield from MovedNames("TQ101", ROWS).find(source)
    for _, alias, full in source.names_from():
        package, _, name = full.rpartition(".")
        if package in PACKAGES and name in FUNCTIONS:
            refusal = f"{package} never had it; import {name} from torchq_compat.quantize_fx"
            yield Site("TQ101", source.start(alias), full, refusal=refusal)


REWRITE = Finder("TQ101", find)
