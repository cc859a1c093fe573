"""Rewrite ``capture_pre_autograd_graph(model, args)``, removed from torch, to ``torch.export.export`` and
``.module()``.

It traced with Dynamo, as ``strict=True`` does: Quantizers find ops by the source functions that Dynamo
records.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import libcst as cst

from torchq_compat.port.constructs import Construct, Edit, ImportRequest, Site
from torchq_compat.port.legacy_api.names import REMOVED_CAPTURES, RemovedCapture
from torchq_compat.port.rewrites.declaration import Rewrite
from torchq_compat.port.source.imports import is_free, plan_name, statement_edits
from torchq_compat.port.source.moved_tables import Moved
from torchq_compat.port.source.parsed import ParsedSource, dotted, imported_module

CODE = "TQ114"
NEW_MODULE, NEW_NAME = "torch.export", "export"
#: The number of leading positional arguments that are the same in both functions.
POSITIONAL = 3
KEYWORDS = ("args", "kwargs", "dynamic_shapes", "strict", "preserve_module_call_signature")


def find(source: ParsedSource) -> Iterator[Site]:
    for node in source.nodes(cst.ImportFrom):
        if not isinstance(node.names, cst.ImportStar):
            yield from _import_sites(source, node, node.names)
    for attribute in source.nodes(cst.Attribute):
        yield from _dotted_site(source, attribute)


def _import_sites(
    source: ParsedSource, node: cst.ImportFrom, aliases: Sequence[cst.ImportAlias]
) -> Iterator[Site]:
    for alias in aliases:
        name = dotted(alias.name)
        removed = REMOVED_CAPTURES.get(f"{imported_module(node)}.{name}")
        if removed is None:
            continue
        site = Site(CODE, source.start(alias), name)
        uses = source.references(alias.evaluated_alias or name, node)
        calls, refusal = _calls(source, list(uses), removed)
        row = Moved(removed.module, NEW_MODULE, {name: NEW_NAME})
        plan = plan_name(source, node, alias, row, name)
        edits = statement_edits(source, node, [plan.new] if plan.new else [])
        if not refusal and not edits:
            refusal = "the import has comments between its names"
        if refusal:
            yield replace(site, refusal=refusal)
        else:
            yield replace(site, edits=(*edits, *plan.use_edits, *calls))


def _dotted_site(source: ParsedSource, node: cst.Attribute) -> Iterator[Site]:
    removed = REMOVED_CAPTURES.get(source.code(node))
    if removed is None or source.written_names(node) != {source.code(node)}:
        return
    start = source.start(node)
    site = Site(CODE, start, source.code(node))
    calls, refusal = _calls(source, [node], removed)
    request = ImportRequest("torch", offset=start)
    if not refusal and not is_free(source, request):
        refusal = "the name torch means something else in this file"
    if refusal:
        yield replace(site, refusal=refusal)
        return
    edit = Edit(start, source.end(node), f"{NEW_MODULE}.{NEW_NAME}")
    yield replace(site, edits=(edit, *calls))


def _calls(
    source: ParsedSource, uses: list[cst.BaseExpression], removed: RemovedCapture
) -> tuple[list[Edit], str]:
    """Return the edits at the calls of ``uses``, or the reason why they are not rewritten."""
    edits: list[Edit] = []
    for use in uses:
        call = source.parent(use)
        if not isinstance(call, cst.Call) or call.func is not use:
            if removed.gave_module:
                return [], f"it is not called at line {source.line(source.start(use))}"
            continue
        positional = [arg for arg in call.args if arg.keyword is None]
        named = [arg.keyword.value for arg in call.args if arg.keyword is not None]
        if any(arg.star for arg in call.args) or len(positional) > POSITIONAL:
            return [], "torch.export.export takes dynamic_shapes by keyword"
        unknown = [name for name in named if name not in KEYWORDS]
        if unknown:
            return [], f"torch.export.export takes no {unknown[0]}"
        if removed.gave_module:
            edits += _strict(source, call) if "strict" not in named else ()
            edits.append(Edit(source.end(call), source.end(call), ".module()"))
    return edits, ""


def _strict(source: ParsedSource, call: cst.Call) -> Iterator[Edit]:
    if call.args:
        last = source.full_end(call.args[-1].value)
        yield Edit(last, last, ", strict=True")


CONSTRUCT = Construct(
    code=CODE,
    title="capture functions that torch has removed",
    becomes="torch.export.export(model, args, strict=True).module()",
    guide="""\
`capture_pre_autograd_graph(model, args)` of `torch._export` is now
`torch.export.export(model, args, strict=True).module()`: only a strict export keeps the source functions by
which `get_source_partitions` finds ops. `export_for_training` is `torch.export.export`. Calls with
`constraints`, or with dynamic shapes by position, are left. `torchq-compat run` puts functions of these names
there.
""",
)

REWRITE = Rewrite(
    name="removed-captures",
    construct=CONSTRUCT,
    summary="capture_pre_autograd_graph and export_for_training become torch.export.export",
    find=find,
    order=6,
)
