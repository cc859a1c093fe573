"""Rewrite modules that torch has removed, such as ``torch.ao.quantization.quantize_pt2e``, to torchao's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import libcst as cst

from torchq_compat.port.constructs import Construct, Edit, ImportRequest, Site
from torchq_compat.port.legacy_api.names import new_module
from torchq_compat.port.rewrites.declaration import Rewrite
from torchq_compat.port.source.imports import is_free
from torchq_compat.port.source.parsed import ParsedSource, dotted, imported_module

CODE = "TQ112"


def find(source: ParsedSource) -> Iterator[Site]:
    for node in source.nodes(cst.ImportFrom):
        yield from _import_from(source, node)
    for statement in source.nodes(cst.Import):
        for alias in statement.names:
            yield from _import(source, alias)
    for attribute in source.nodes(cst.Attribute):
        yield from _attribute(source, attribute)


def _import_from(source: ParsedSource, node: cst.ImportFrom) -> Iterator[Site]:
    module = imported_module(node)
    new = new_module(module)
    site = Site(CODE, source.start(node), f"from {module}")
    if new is not None and node.module is not None:
        yield replace(site, edits=(Edit(source.start(node.module), source.end(node.module), new),))
        return
    if isinstance(node.names, cst.ImportStar) or node.module is None:
        return
    moved = [alias for alias in node.names if new_module(f"{module}.{dotted(alias.name)}")]
    if not moved:
        return
    if len(moved) < len(node.names):
        yield replace(site, refusal="the statement also imports names that are still there")
        return
    parents = {str(new_module(f"{module}.{dotted(alias.name)}")).rpartition(".")[0] for alias in moved}
    if len(parents) > 1:
        yield replace(site, refusal="what it imports is in several modules now")
        return
    yield replace(site, edits=(Edit(source.start(node.module), source.end(node.module), parents.pop()),))


def _import(source: ParsedSource, alias: cst.ImportAlias) -> Iterator[Site]:
    name = dotted(alias.name)
    new = new_module(name)
    if new is not None:
        edit = Edit(source.start(alias.name), source.end(alias.name), new)
        yield Site(CODE, source.start(alias), f"import {name}", (edit,))


def _attribute(source: ParsedSource, node: cst.Attribute) -> Iterator[Site]:
    """Yield the site of a removed module written out as a dotted name; the rest of the name is kept."""
    code = source.code(node)
    new = new_module(code)
    if new is None or source.written_names(node) != {code} or new_module(source.code(node.value)):
        return
    parent = source.parent(node)
    while isinstance(parent, cst.Attribute) and new_module(source.code(parent)) not in (
        None,
        f"{new}.{parent.attr.value}",
    ):
        # A submodule may have moved to a module of its own.
        node, new = parent, str(new_module(source.code(parent)))
        parent = source.parent(node)
    site = Site(CODE, source.start(node), code)
    if any(isinstance(a, (cst.ImportFrom, cst.Import)) for a in source.ancestors(node)):
        return
    request = ImportRequest(new, offset=source.start(node))
    if not is_free(source, request):
        yield replace(site, refusal=f"the name {new.partition('.')[0]} means something else in this file")
        return
    yield replace(site, edits=(Edit(source.start(node), source.end(node), new),), imports=(request,))


CONSTRUCT = Construct(
    code=CODE,
    title="modules that torch has removed",
    becomes="the module of torchao, or of executorch for the XNNPACK quantizer",
    guide="""\
`torch.ao.quantization.quantize_pt2e`, `torch.ao.quantization.quantizer` and `torch.ao.quantization.pt2e` are
`torchao.quantization.pt2e.quantize_pt2e`, `.quantizer` and `torchao.quantization.pt2e` now; the XNNPACK
quantizer is in `executorch.backends.xnnpack.quantizer`. `torchq-compat run` redirects the imports.
""",
)

REWRITE = Rewrite(
    name="removed-modules",
    construct=CONSTRUCT,
    summary="imports of PT2E modules that torch has removed come from torchao",
    find=find,
    order=5,
)
