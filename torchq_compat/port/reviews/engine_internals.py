"""Find imports and dotted uses of FX's own engine."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from torchq_compat.port.constructs import Construct, Site
from torchq_compat.port.legacy_api.names import ENGINE_INTERNALS
from torchq_compat.port.reviews.review import ManualReview
from torchq_compat.port.source.parsed import ParsedSource, names_in_import


def find(source: ParsedSource) -> Iterator[Site]:
    """Yield imports and dotted uses; uses of an imported name are not listed again."""
    refusal = "it is part of FX's own engine"
    for node in source.imports():
        for name in names_in_import(node):
            if _is_internal(source.follow(name)):
                yield Site("TQ203", source.start(node), name, refusal=refusal)
    for attribute in source.nodes(cst.Attribute):
        if _names_internal(source, attribute) and not _names_internal(source, attribute.value):
            yield Site("TQ203", source.start(attribute), source.code(attribute), refusal=refusal)


def _names_internal(source: ParsedSource, node: cst.CSTNode) -> bool:
    names = source.names(node)
    return bool(names) and all(map(_is_internal, names))


def _is_internal(name: str) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in ENGINE_INTERNALS)


CONSTRUCT = Construct(
    code="TQ203",
    title="FX engine internals",
    becomes="nothing with the same shape; see the guide",
    guide="""\
Tracers, pattern matchers, graph passes, private functions and the model report are FX's own engine. For
what was quantized and why, use `explain`; to change what is quantized, use the configuration classes.
""",
)

REVIEW = ManualReview(CONSTRUCT, find)
