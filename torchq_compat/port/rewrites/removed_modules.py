"""Rewrite modules that torch has removed, such as ``torch.ao.quantization.quantize_pt2e``, to torchao's, and
PT2E's prepare and convert to ``torchq_compat.pt2e``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import libcst as cst

from torchq_compat.port.constructs import Edit, ImportRequest, Site
from torchq_compat.port.finders import Finder
from torchq_compat.port.legacy_api import names as legacy
from torchq_compat.port.legacy_api.moved_names import MovedNames
from torchq_compat.port.source.imports import moved_modules, why_not_free
from torchq_compat.port.source.parsed import ParsedSource, dotted, imported_module
from torchq_compat.port.source.source_tree import installed_lacks

CODE, CODE_OF_PT2E = "TQ112", "TQ120"
OF_PT2E = frozenset(row.legacy for row in legacy.MOVED_PT2E)


def find(source: ParsedSource) -> Iterator[Site]:
    def now(node: cst.ImportFrom, alias: cst.ImportAlias) -> tuple[str, str] | None:
        return _now(imported_module(node), dotted(alias.name))

    for node in source.nodes(cst.ImportFrom):
        new = legacy.new_module(imported_module(node)) if isinstance(node.names, cst.ImportStar) else None
        if new is not None and node.module is not None:
            edit = Edit(source.start(node.module), source.end(node.module), new)
            yield Site(CODE, source.start(node), f"from {imported_module(node)}", edits=(edit,))
    yield from moved_modules(source, CODE, now, _import, _attribute)
    yield from MovedNames(CODE, (), guests=legacy.MOVED_OF_EXPORTED).find(source)


def _now(module: str, name: str) -> tuple[str, str] | None:
    """Return the module and the name of ``module.name`` now; None if it did not move."""
    new, full = legacy.new_module(module), f"{module}.{name}"
    if module in OF_PT2E and name in legacy.PT2E_FUNCTIONS:
        return None  # The other rewrite moves it.
    if full in legacy.REMOVED:
        package, _, last = legacy.REMOVED[full].rpartition(".")
        return package, last
    if new is None:
        return None
    if name in legacy.NAMES_ELSEWHERE and installed_lacks(new, name):
        return legacy.NAMES_ELSEWHERE[name]
    return new, name


def _import(source: ParsedSource, node: cst.Import, alias: cst.ImportAlias) -> Iterator[Site]:
    name = dotted(alias.name)
    new = legacy.new_module(name)
    if new is None:
        return
    site = Site(CODE, source.start(alias), f"import {name}")
    edits = [Edit(source.start(alias.name), source.end(alias.name), new)]
    if alias.asname is not None:
        uses = (source.parent(use) for use in source.references(alias.evaluated_alias or "", node))
        for use in uses:
            if not isinstance(use, cst.Attribute) or use.attr.value in legacy.PT2E_FUNCTIONS:
                continue
            home, now = legacy.NAMES_ELSEWHERE.get(use.attr.value, (new, use.attr.value))
            if reason := installed_lacks(new, now if home == new else use.attr.value):
                yield replace(site, refusal=reason)
                return
            if now != use.attr.value:
                edits.append(Edit(source.start(use.attr), source.end(use.attr), now))
    yield replace(site, edits=tuple(edits))


def _attribute(source: ParsedSource, node: cst.Attribute) -> Iterator[Site]:
    """Yield the site of a removed module written out as a dotted name; the rest of the name is kept."""
    code = source.code(node)
    new = legacy.new_module(code)
    if new is None or source.written_names(node) != {code} or legacy.new_module(source.code(node.value)):
        return
    parent = source.parent(node)
    while isinstance(parent, cst.Attribute) and legacy.new_module(source.code(parent)) not in (
        None,
        f"{new}.{parent.attr.value}",
    ):
        # A submodule may have moved to a module of its own.
        node, new = parent, str(legacy.new_module(source.code(parent)))
        parent = source.parent(node)
    if any(isinstance(a, (cst.ImportFrom, cst.Import)) for a in source.ancestors(node)):
        return
    site, used = Site(CODE, source.start(node), code), node
    while isinstance(parent, cst.Attribute) and not installed_lacks(f"{new}.{parent.attr.value}"):
        node, new = parent, f"{new}.{parent.attr.value}"  # A module further down.
        parent = source.parent(node)
    edits = [Edit(source.start(used), source.end(node), new)]
    if isinstance(parent, cst.Attribute) and parent.attr.value not in legacy.PT2E_FUNCTIONS:
        name = parent.attr.value
        home, now = (
            legacy.NAMES_ELSEWHERE[name]
            if name in legacy.NAMES_ELSEWHERE and installed_lacks(new, name)
            else (new, name)
        )
        if reason := installed_lacks(home, now):
            yield replace(site, refusal=reason)
            return
        edits, new = [Edit(source.start(used), source.end(parent), f"{home}.{now}")], home
    request = ImportRequest(new, offset=source.start(node))
    yield site.settled(why_not_free(source, request), edits, (request,))


def find_pt2e(source: ParsedSource) -> Iterator[Site]:
    old = next(filter(None, (_of_qconfigs(source, call) for call in source.nodes(cst.Call))), "")
    for site in MovedNames(CODE_OF_PT2E, legacy.MOVED_PT2E).find(source):
        yield replace(site, edits=(), imports=(), refusal=old) if old else site


def _of_qconfigs(source: ParsedSource, call: cst.Call) -> str:
    """Return why ``call`` cannot stay: the first ``prepare_pt2e`` took a QConfigMapping."""
    names = {
        name.rpartition(".")[2] for name in source.names(call.func) if name.rpartition(".")[0] in OF_PT2E
    }
    if len(call.args) > 2 and names and all(name.startswith("prepare") for name in names):
        return "it takes a QConfigMapping: write prepare_pt2e(m, torchq_compat.quantizer_from(mapping))"
    return ""


REWRITE = Finder(
    CODE, find, ("_pt2e", "QNNPackQuantizer", "XNNPACKQuantizer", "X86InductorQuantizer", *legacy.OF_EXPORTED)
)

REWRITE_OF_PT2E = Finder(
    CODE_OF_PT2E,
    find_pt2e,
    ("prepare_pt2e", "prepare_qat_pt2e", "convert_pt2e", "_quantize_pt2e", "prepare_pt2e_quantizer"),
)
