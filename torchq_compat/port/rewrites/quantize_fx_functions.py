"""Rewrite the functions of ``torch.ao.quantization.quantize_fx``, however imported, to
``torchq_compat.quantize_fx``."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from torchq_compat.port.constructs import Construct, Site
from torchq_compat.port.legacy_api.moved_names import MovedNames
from torchq_compat.port.rewrites.declaration import Rewrite
from torchq_compat.port.source.moved_tables import FUNCTIONS, MOVED_FUNCTIONS
from torchq_compat.port.source.parsed import ParsedSource, dotted, imported_module

ROWS = tuple(row for row in MOVED_FUNCTIONS if row.replacement == "torchq_compat.quantize_fx")
#: These names never were here, but a docstring of FX says so, and scripts copy it.
PACKAGES = frozenset(row.legacy.rpartition(".")[0] for row in ROWS)


def find(source: ParsedSource) -> Iterator[Site]:
    yield from MovedNames("TQ101", ROWS).find(source)
    for node in source.nodes(cst.ImportFrom):
        package = imported_module(node)
        if package not in PACKAGES or isinstance(node.names, cst.ImportStar):
            continue
        for alias in node.names:
            name = dotted(alias.name)
            if name in FUNCTIONS:
                refusal = f"{package} never had it; import {name} from torchq_compat.quantize_fx"
                yield Site("TQ101", source.start(alias), f"{package}.{name}", refusal=refusal)


CONSTRUCT = Construct(
    code="TQ101",
    title="quantize_fx functions",
    becomes="the function of the same name in torchq_compat.quantize_fx",
    guide="""\
`prepare_fx`, `prepare_qat_fx`, `convert_fx`, `convert_to_reference_fx` and `fuse_fx` of
`torch.ao.quantization.quantize_fx` or `torch.quantization.quantize_fx`, imported by name, as a module,
under an alias or spelled out: the same names in `torchq_compat.quantize_fx`. Left: `import *`, which also
brings names that did not move, a module that is passed on as an object, and
`from torch.ao.quantization import prepare_fx`, which stood in docstrings of FX and never worked. A file's
functions move all or none: where it also calls `_fuse_fx`, `_prepare_fx` or another function of the engine
that makes models, all stay with FX, and `torchq-compat run` runs it.
""",
)

REWRITE = Rewrite(
    name="quantize-fx-functions",
    construct=CONSTRUCT,
    summary="prepare_fx, convert_fx and related functions come from torchq_compat.quantize_fx",
    find=find,
    order=80,
)
