"""Rewrite ``get_default_qconfig_dict`` and related functions to the functions that return the object."""

from collections.abc import Iterator

import libcst as cst

from torchq_compat.port.constructs import Edit, Site
from torchq_compat.port.finders import Finder
from torchq_compat.port.legacy_api.fx_calls import fx_calls, only_value
from torchq_compat.port.legacy_api.names import DICT_GETTERS
from torchq_compat.port.source.parsed import ParsedSource, dotted


def find(source: ParsedSource) -> Iterator[Site]:
    for node, alias, full in source.names_from():
        if full in DICT_GETTERS:
            yield _import_site(source, node, alias, DICT_GETTERS[full])
    for attribute in source.nodes(cst.Attribute):
        names = source.names(attribute)
        new_name = DICT_GETTERS.get(next(iter(names))) if len(names) == 1 else None
        if new_name is not None:
            refusal = _refusal(source, attribute)
            edit = Edit(source.start(attribute.attr), source.end(attribute.attr), new_name)
            yield Site("TQ109", source.start(attribute), attribute.attr.value).settled(refusal, (edit,))


def _import_site(source: ParsedSource, node: cst.ImportFrom, alias: cst.ImportAlias, new_name: str) -> Site:
    name = dotted(alias.name)
    local = alias.evaluated_alias or name
    uses = source.references(local, node)
    start = source.start(alias)
    refusal = next(filter(None, (_refusal(source, use) for use in uses)), "")
    if not refusal and alias.asname is None and source.binds(new_name):
        refusal = f"the name {new_name} is already bound in this file"
    if not refusal and name in source.taken_by_others:
        refusal = f"another file uses {name}"
    edits = [Edit(source.start(alias.name), source.end(alias.name), new_name)]
    if alias.asname is None:
        edits += [Edit(source.start(use), source.end(use), new_name) for use in uses]
    return Site("TQ109", start, name).settled(refusal, edits)


def _refusal(source: ParsedSource, function: cst.CSTNode) -> str:
    """Return the reason why the dict cannot become an object: code other than an FX call uses it; empty if
    none does."""
    call = source.parent(function)
    if not isinstance(call, cst.Call) or call.func is not function:
        return f"the function itself is used at line {source.line(source.start(function))}"
    arguments = {arg for fx in fx_calls(source) for arg in fx.node.args}
    parent = source.parent(call)
    if parent in arguments:
        return ""
    target = parent.targets[0].target if isinstance(parent, cst.Assign) else None
    if not isinstance(target, cst.Name) or only_value(source, target) is None:
        return f"the dict is used at line {source.line(source.start(call))}"
    for use in source.references(target.value, target):
        if source.parent(use) not in arguments:
            return f"the dict is used at line {source.line(source.start(use))}"
    return ""


REWRITE = Finder("TQ109", find)
