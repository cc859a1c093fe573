"""Find names that no rewrite carries over: of FX's engine, the Numeric Suite, and quantized modules and
kernels that a script calls by hand; and legacy names in string literals."""

from collections.abc import Iterator
from functools import partial

import libcst as cst

from torchq_compat.port.constructs import Site
from torchq_compat.port.finders import Finder
from torchq_compat.port.names import ENGINE_INTERNALS, LEGACY_MODULES, LEGACY_NAMES, NUMERIC_SUITE
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
MODULES = ("torch.ao.nn.quantized.", "torch.nn.quantized.", "torch.ao.nn.intrinsic.quantized.")
KERNELS = "torch.ops.quantized."
#: Names of these modules that compute on floats, or carry a custom config.
OTHERS = ("FloatFunctional", "FXFloatFunctional", "QFunctional", "dynamic", "reference", "modules")


def find_uses(code: str, source: ParsedSource) -> Iterator[Site]:
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


def find_in_strings(source: ParsedSource) -> Iterator[Site]:
    for string in source.nodes(cst.SimpleString):
        if string.raw_value in LEGACY_NAMES | LEGACY_MODULES:
            refusal = "a name in a text: only its user knows what it is for"
            yield Site("TQ204", source.start(string), source.code(string), refusal=refusal)


def find_by_hand(source: ParsedSource) -> Iterator[Site]:
    """Yield calls such as ``nnq.Conv2d(...)``, ``nnq.Linear.from_float(m)``, ``torch.ops.quantized.add``."""
    for call in source.nodes(cst.Call):
        names = source.names(call.func)
        if names and all(map(_is_by_hand, names)):
            refusal = "it works on quantized tensors, which torch removes; leave it to convert"
            yield Site("TQ209", source.start(call), source.code(call.func), refusal=refusal)


def _is_by_hand(name: str) -> bool:
    if name.startswith(KERNELS):
        return True
    prefix = next((module for module in MODULES if name.startswith(module)), None)
    return prefix is not None and name.removeprefix(prefix).split(".")[0] not in OTHERS


ENGINE = Finder("TQ203", partial(find_uses, "TQ203"))
SUITE = Finder("TQ206", partial(find_uses, "TQ206"))
IN_STRINGS = Finder("TQ204", find_in_strings)
BY_HAND = Finder("TQ209", find_by_hand, ("quantized",))
