"""Find imports and dotted uses of FX's own engine, and of the Numeric Suite, eager and FX."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import libcst as cst

from torchq_compat.port.constructs import Site
from torchq_compat.port.finders import Finder
from torchq_compat.port.legacy_api.names import ENGINE_INTERNALS, NUMERIC_SUITE
from torchq_compat.port.source.parsed import ParsedSource, names_in_import

#: Functions of two tensors in the Numeric Suite, which any code may call.
METRICS = (
    "compute_cosine_similarity",
    "compute_error",
    "compute_normalized_l2_error",
    "compute_sqnr",
)
#: Code -> the modules and functions that it is about, and why they are left.
LEFT = {
    "TQ203": (ENGINE_INTERNALS, "it is part of FX's own engine"),
    "TQ206": (
        NUMERIC_SUITE,
        "it finds nothing in a captured graph; torchq_compat.compare and suggest measure every place",
    ),
}


def find(code: str, source: ParsedSource) -> Iterator[Site]:
    """Yield imports and dotted uses; uses of an imported name are not listed again."""
    prefixes, refusal = LEFT[code]

    def is_left(name: str) -> bool:
        is_metric = code == "TQ206" and name.rpartition(".")[2] in METRICS
        return not is_metric and any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)

    def names_left(names: frozenset[str]) -> bool:
        return bool(names) and all(map(is_left, names))

    for node in source.imports():
        for name in names_in_import(node):
            if is_left(source.follow(name)):
                yield Site(code, source.start(node), name, refusal=refusal)
    for attribute in source.nodes(cst.Attribute):
        if names_left(source.names(attribute)) and not names_left(source.names(attribute.value)):
            yield Site(code, source.start(attribute), source.code(attribute), refusal=refusal)


ENGINE = Finder("TQ203", partial(find, "TQ203"))
SUITE = Finder("TQ206", partial(find, "TQ206"))
