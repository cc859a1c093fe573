"""Rewrite ``capture_pre_autograd_graph(model, args)``, removed from torch, and ``torch._dynamo.export`` to
``torch.export.export`` and ``.module()``.

It traced with Dynamo, as ``strict=True`` does: Quantizers find ops by the source functions that Dynamo
records.
"""

from collections.abc import Iterator

import libcst as cst

from torchq_compat.port.constructs import Edit, ImportRequest, Site
from torchq_compat.port.finders import Finder
from torchq_compat.port.names import REMOVED_CAPTURES, Moved
from torchq_compat.port.source import imports as import_tables
from torchq_compat.port.source.fx_calls import uses_pt2e
from torchq_compat.port.source.parsed import ParsedSource

CODE = "TQ114"
NEW_MODULE, NEW_NAME = "torch.export", "export"
#: The number of leading positional arguments that are the same in both functions.
POSITIONAL = 3
#: In place of a reason: another rewrite has to come first, which will.
SETTLED = "<settled>"
KEYWORDS = ("args", "kwargs", "dynamic_shapes", "strict", "preserve_module_call_signature")


def find(source: ParsedSource) -> Iterator[Site]:
    for node, alias, full in source.names_from():
        if full not in REMOVED_CAPTURES:
            continue
        module, _, name = full.rpartition(".")
        site = Site(CODE, source.start(alias), name)
        uses = source.references(alias.evaluated_alias or name, node)
        calls, refusal = _calls(source, list(uses), gave_module=REMOVED_CAPTURES[full])
        row = Moved(module, NEW_MODULE, {name: NEW_NAME})
        plan = import_tables.plan_name(source, node, alias, row, name)
        edits = import_tables.statement_edits(source, node, [plan])
        if refusal == SETTLED:
            yield site
        else:
            refusal = refusal or ("" if edits else import_tables.COMMENTS_BETWEEN_NAMES)
            yield site.settled(refusal, (*edits, *plan.use_edits, *calls))
    for attribute in source.nodes(cst.Attribute):
        yield from _dotted_site(source, attribute)


def _dotted_site(source: ParsedSource, node: cst.Attribute) -> Iterator[Site]:
    full, start = source.code(node), source.start(node)
    if full not in REMOVED_CAPTURES or source.written_names(node) != {full}:
        return
    site = Site(CODE, start, full)
    calls, refusal = _calls(source, [node], gave_module=REMOVED_CAPTURES[full])
    refusal = refusal or import_tables.why_not_free(source, ImportRequest("torch", offset=start))
    yield site.settled(refusal, (source.edit(node, f"{NEW_MODULE}.{NEW_NAME}"), *calls))


def _calls(
    source: ParsedSource, uses: list[cst.BaseExpression], *, gave_module: bool
) -> tuple[list[Edit], str]:
    """Return the edits at the calls of ``uses``, or the reason why they are not rewritten."""
    edits: list[Edit] = []
    for use in uses:
        call = source.parent(use)
        if not isinstance(call, cst.Call) or call.func is not use:
            if gave_module:
                return [], f"it is not called at line {source.line(source.start(use))}"
            continue
        positional = [arg for arg in call.args if arg.keyword is None]
        named = [arg.keyword.value for arg in call.args if arg.keyword is not None]
        if any(arg.star for arg in call.args) or len(positional) > POSITIONAL:
            return [], "torch.export.export takes dynamic_shapes by keyword"
        unknown = [name for name in named if name not in KEYWORDS]
        if unknown == ["constraints"] and any(site.edits for site in find_dynamic_dim(source)):
            return [], SETTLED
        if unknown:
            return [], f"torch.export.export takes no {unknown[0]}"
        if gave_module:
            if call.args and "strict" not in named:
                last = source.full_end(call.args[-1].value)
                edits.append(Edit(last, last, ", strict=True"))
            edits.append(Edit(source.end(call), source.end(call), ".module()"))
    return edits, ""


# ``torch._dynamo.export``, by which the first tutorials captured, and ``dynamic_dim``.

DYNAMO, DYNAMIC_DIM = "torch._dynamo.export", "dynamic_dim"
#: Keywords of dynamo's export -> the values with which torch.export.export captures the same.
DROPPED = {"aten_graph": ("True",), "tracing_mode": ('"real"', "'real'"), "pre_dispatch": ("True", "False")}


def find_dynamo(source: ParsedSource) -> Iterator[Site]:
    """Yield calls of dynamo's export in files for PT2E; elsewhere it is used for other things."""
    if not uses_pt2e(source):
        return
    for call in source.nodes(cst.Call):
        if source.names(call.func) == {DYNAMO}:
            site = Site("TQ121", source.start(call), source.code(call.func))
            edit, refusal = _dynamo_edit(source, call)
            request = ImportRequest("torch", offset=site.offset)
            refusal = refusal or import_tables.why_not_free(source, request)
            yield site.settled(refusal, (edit,) if edit else (), (request,))


def _dynamo_edit(source: ParsedSource, call: cst.Call) -> tuple[Edit | None, str]:
    """Return the edit that puts ``torch.export.export(...).module()`` in the place of the graph module that
    ``call`` returns first, or why there is none."""
    model, *examples = [arg for arg in call.args if arg.keyword is None]
    for arg in call.args:
        name = arg.keyword.value if arg.keyword is not None else ""
        if name and source.code(arg.value) not in DROPPED.get(name, ()):
            return None, f"torch.export.export has no {name}={source.code(arg.value)}"
    whole: cst.CSTNode = call
    outer = source.parent(call)
    if not examples and isinstance(outer, cst.Call) and outer.func is call:
        whole, examples = outer, list(outer.args)
    if len(examples) == 1 and examples[0].star == "*":
        args = source.full_code(examples[0].value)
    elif examples and not any(arg.star or arg.keyword for arg in examples):
        args = f"({', '.join(source.full_code(arg.value) for arg in examples)},)"
    else:
        return None, "its example inputs are not spelled out"
    text = f"torch.export.export({source.full_code(model.value)}, {args}, strict=True).module()"
    parent = source.parent(whole)
    match parent:
        case (
            cst.Attribute(attr=cst.Name("graph_module"))
            | cst.Subscript(slice=[cst.SubscriptElement(cst.Index(cst.Integer("0")))])
        ):
            return source.edit(parent, text), ""
    target = parent.targets[0].target if isinstance(parent, cst.Assign) else None
    if not isinstance(target, cst.Tuple) or len(target.elements) != 2 or source.has_comment(parent):
        return None, "torch.export.export returns no guards"
    graph, guards = (element.value for element in target.elements)
    if not isinstance(guards, cst.Name) or source.references(guards.value, guards):
        return None, "the guards are used, which torch.export.export does not return"
    return source.edit(parent, f"{source.code(graph)} = {text}"), ""


def find_dynamic_dim(source: ParsedSource) -> Iterator[Site]:
    """Yield imports of ``dynamic_dim``, with its calls in lists that are given as ``constraints``."""
    for node, alias, full in source.names_from():
        if full not in (f"torch.export.{DYNAMIC_DIM}", f"torch._export.{DYNAMIC_DIM}"):
            continue
        site = Site("TQ122", source.start(alias), DYNAMIC_DIM)
        edits, refusal = _constraints(source, node, alias.evaluated_alias or DYNAMIC_DIM)
        new = import_tables.statement_edits(source, node, [import_tables.NewImport(alias, NEW_MODULE, "Dim")])
        if not new or source.binders("Dim"):
            refusal = refusal or "Dim cannot be imported here"
        yield site.settled(refusal, (*new, *edits))


def _constraints(source: ParsedSource, node: cst.ImportFrom, local: str) -> tuple[list[Edit], str]:
    edits: list[Edit] = []
    lists: dict[cst.List, list[cst.Call]] = {}
    for use in source.references(local, node):
        call = source.parent(use)
        owner = source.parent(source.parent(call))
        if not isinstance(call, cst.Call) or call.func is not use or not isinstance(owner, cst.List):
            return [], f"it is not an entry of a list at line {source.line(source.start(use))}"
        lists.setdefault(owner, []).append(call)
    for entries, calls in lists.items():
        shapes = _shapes(source, calls) if len(calls) == len(entries.elements) else ""
        keywords = _constraint_keywords(source, entries)
        if not shapes or not keywords:
            return [], "write dynamic_shapes= of torch.export.export with Dim.AUTO where a size is free"
        edits.append(source.edit(entries, shapes))
        edits += [source.edit(word, "dynamic_shapes") for word in keywords]
    return edits, ""


def _shapes(source: ParsedSource, calls: list[cst.Call]) -> str:
    """Return ``dynamic_shapes`` for the calls ``dynamic_dim(inputs[i], d)``; empty for other forms."""
    free: dict[str, dict[str, list[str]]] = {}
    for call in calls:
        if len(call.args) != 2 or not isinstance(call.args[0].value, cst.Subscript):
            return ""
        tensor = call.args[0].value
        index = source.code(tensor)[source.end(tensor.value) - source.start(tensor) :].strip("[] ")
        dims = free.setdefault(source.code(tensor.value), {}).setdefault(index, [])
        dims.append(source.code(call.args[1].value))
    if len(free) != 1:
        return ""
    ((inputs, by_index),) = free.items()
    named = {i: "{" + ", ".join(f"{d}: Dim.AUTO" for d in dims) + "}" for i, dims in by_index.items()}
    table = "{" + ", ".join(f"{i}: {dims}" for i, dims in named.items()) + "}"
    return f"tuple({table}.get(i) for i in range(len({inputs})))"


def _constraint_keywords(source: ParsedSource, entries: cst.List) -> list[cst.Name]:
    """Return the keywords ``constraints`` by which the list is given, itself or as a variable's value."""
    parent = source.parent(entries)
    if isinstance(parent, cst.Arg):
        uses: list[cst.CSTNode] = [parent]
    else:
        target = parent.targets[0].target if isinstance(parent, cst.Assign) else None
        if not isinstance(target, cst.Name):
            return []
        uses = [source.parent(use) for use in source.references(target.value, target)]
    keywords = [use.keyword for use in uses if isinstance(use, cst.Arg) and use.keyword is not None]
    return keywords if len(keywords) == len(uses) and all(k.value == "constraints" for k in keywords) else []


REWRITE = Finder(CODE, find)

REWRITE_OF_DYNAMO = Finder("TQ121", find_dynamo, ("torchdynamo", "torch._dynamo"))
REWRITE_OF_DYNAMIC_DIM = Finder("TQ122", find_dynamic_dim, (DYNAMIC_DIM,))
