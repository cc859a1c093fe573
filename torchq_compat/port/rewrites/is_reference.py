"""Rewrite ``convert_fx(model, is_reference=True)``, removed in torch 1.13, to
``convert_to_reference_fx(model)``."""

from collections.abc import Iterator

import libcst as cst

from torchq_compat.port.constructs import Edit, ImportRequest, Site
from torchq_compat.port.finders import Finder
from torchq_compat.port.legacy_api.fx_calls import FxCall, fx_calls
from torchq_compat.port.source.imports import why_not_free
from torchq_compat.port.source.parsed import ParsedSource

NEW_NAME = "convert_to_reference_fx"


def find(source: ParsedSource) -> Iterator[Site]:
    for call in fx_calls(source):
        if call.function != "convert_fx":
            continue
        for index, arg in enumerate(call.node.args):
            if arg.keyword is not None and arg.keyword.value == "is_reference":
                yield _site(source, call, index)


def _site(source: ParsedSource, call: FxCall, index: int) -> Site:
    arg = call.node.args[index]
    start = source.start(arg)
    value = arg.value.value if isinstance(arg.value, cst.Name) else ""
    site = Site("TQ108", start, f"is_reference={source.code(arg.value)}")
    if value not in ("True", "False") or not index:
        return site.settled("which function to call depends on a value", ())
    before = call.node.args[index - 1].value
    removed = Edit(source.full_end(before), source.full_end(arg.value), "")
    if b"#" in source.data[removed.start : start]:
        return site.settled("there is a comment before it", ())
    edits = [removed]
    imports: tuple[ImportRequest, ...] = ()
    if value == "True":
        function = call.node.func
        name = function.attr if isinstance(function, cst.Attribute) else function
        edits.append(Edit(source.start(name), source.end(name), NEW_NAME))
        if name is function:
            imports = (ImportRequest("torchq_compat.quantize_fx", NEW_NAME, source.start(function)),)
    return site.settled("".join(why_not_free(source, request) for request in imports), edits, imports)


REWRITE = Finder("TQ108", find)
