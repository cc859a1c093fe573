"""Find quantized modules and kernels of torch.ao that a script calls by hand."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from torchq_compat.port.constructs import Site
from torchq_compat.port.finders import Finder
from torchq_compat.port.source.parsed import ParsedSource

MODULES = ("torch.ao.nn.quantized.", "torch.nn.quantized.", "torch.ao.nn.intrinsic.quantized.")
KERNELS = "torch.ops.quantized."
#: Names of these modules that compute on floats, or carry a custom config.
OTHERS = ("FloatFunctional", "FXFloatFunctional", "QFunctional", "dynamic", "reference", "modules")


def find(source: ParsedSource) -> Iterator[Site]:
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


REVIEW = Finder("TQ209", find, ("quantized",))
