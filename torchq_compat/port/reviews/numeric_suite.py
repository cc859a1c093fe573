"""Find imports and dotted uses of the Numeric Suite, eager and FX."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from torchq_compat.port.constructs import Construct, Site
from torchq_compat.port.legacy_api.names import NUMERIC_SUITE
from torchq_compat.port.reviews.review import ManualReview
from torchq_compat.port.source.parsed import ParsedSource, names_in_import

CODE = "TQ206"
#: Functions of two tensors, which any code may call.
METRICS = (
    "compute_cosine_similarity",
    "compute_error",
    "compute_normalized_l2_error",
    "compute_sqnr",
)
REFUSAL = "it finds nothing in a captured graph; torchq_compat.compare and suggest measure every place"


def find(source: ParsedSource) -> Iterator[Site]:
    for node in source.imports():
        for name in names_in_import(node):
            if _is_suite(source.follow(name)):
                yield Site(CODE, source.start(node), name, refusal=REFUSAL)
    for attribute in source.nodes(cst.Attribute):
        if _names_suite(source, attribute) and not _names_suite(source, attribute.value):
            yield Site(CODE, source.start(attribute), source.code(attribute), refusal=REFUSAL)


def _names_suite(source: ParsedSource, node: cst.CSTNode) -> bool:
    names = source.names(node)
    return bool(names) and all(map(_is_suite, names))


def _is_suite(name: str) -> bool:
    return name.rpartition(".")[2] not in METRICS and any(
        name == prefix or name.startswith(f"{prefix}.") for prefix in NUMERIC_SUITE
    )


CONSTRUCT = Construct(
    code=CODE,
    title="Numeric Suite",
    becomes="torchq_compat.compare, or torchq_compat.suggest",
    guide="""\
`compare_weights`, `extract_weights`, loggers and shadows look for torch.ao's modules, by their names in a
state_dict too: of a captured model they find nothing. Given one of our models, or the state_dict of one,
they raise an error that says so. `torchq_compat.compare`, or `torchq-compat compare`, measures every module,
part and output against the float model; `torchq_compat.suggest` returns the mapping that leaves the worst
places float.
""",
)

REVIEW = ManualReview(CONSTRUCT, find)
