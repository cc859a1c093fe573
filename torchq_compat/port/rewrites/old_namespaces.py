"""Rewrite ``torch.quantization``, ``torch.nn.quantized`` and related namespaces to ``torch.ao``.

The old namespaces still work and have the same objects, so only files that use FX graph mode are rewritten.
"""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from torchq_compat.port.constructs import Edit, ImportRequest, Site
from torchq_compat.port.finders import Finder
from torchq_compat.port.legacy_api.fx_calls import uses_fx
from torchq_compat.port.legacy_api.names import NAMESPACES, NOT_IN_NAMESPACES, new_module
from torchq_compat.port.source.imports import moved_modules, why_not_free
from torchq_compat.port.source.moved_tables import LEGACY_NAMES
from torchq_compat.port.source.parsed import ParsedSource, dotted, imported_module

ONLY_IN_PART = "not everything used of it is under torch.ao"


def find(source: ParsedSource) -> Iterator[Site]:
    if not uses_fx(source):
        return
    staying = []

    def now(node: cst.ImportFrom, alias: cst.ImportAlias) -> tuple[str, str] | None:
        module = imported_module(node)
        new = new_namespace(f"{module}.{dotted(alias.name)}")
        if new is None or node.module is None:
            return None
        if any(_is_excluded(use) for use in _attribute_uses(source, node, alias, module)):
            what = f"from {module} import {dotted(alias.name)}"
            staying.append(Site("TQ104", source.start(alias), what, refusal=ONLY_IN_PART))
            return None
        package, _, name = new.rpartition(".")
        return package, name

    yield from moved_modules(source, "TQ104", now, _import, _attribute)
    yield from staying


def new_namespace(name: str) -> str | None:
    """Return ``name`` under torch.ao, if it is an old namespace or in one; None otherwise."""
    return None if _is_excluded(name) else new_module(name, NAMESPACES)


def _is_excluded(name: str) -> bool:
    parts = name.split(".")
    prefixes = {".".join(parts[:cut]) for cut in range(1, len(parts) + 1)}
    return not prefixes.isdisjoint(NOT_IN_NAMESPACES) or any(part.startswith("_") for part in parts)


def _import(source: ParsedSource, node: cst.Import, alias: cst.ImportAlias) -> Iterator[Site]:
    name = dotted(alias.name)
    new = new_namespace(name)
    if new is None:
        return
    site = Site("TQ104", source.start(alias), f"import {name}")
    is_excluded = any(_is_excluded(use) for use in _attribute_uses(source, node, alias, ""))
    edit = Edit(source.start(alias.name), source.end(alias.name), new)
    yield site.settled(ONLY_IN_PART if is_excluded else "", (edit,))


def _attribute_uses(
    source: ParsedSource, node: cst.Import | cst.ImportFrom, alias: cst.ImportAlias, module: str
) -> Iterator[str]:
    """Yield the full names used of an imported namespace."""
    name = dotted(alias.name)
    local = alias.evaluated_alias or name.partition(".")[0]
    for use in source.references(local, node):
        parent = source.parent(use)
        if isinstance(parent, cst.Attribute) and alias.asname is None and not module:
            continue  # import a.b: its uses are dotted, and are sites of their own
        full = f"{module}.{name}" if module else name
        if not isinstance(parent, cst.Attribute):
            yield full
        elif not _is_function_of_fx(f"{full}.{parent.attr.value}", source.parent(parent)):
            yield f"{full}.{parent.attr.value}"


def _is_function_of_fx(module: str, node: cst.CSTNode) -> bool:
    """Return whether ``node`` is a function of ``module`` that another rewrite moves."""
    return isinstance(node, cst.Attribute) and f"{module}.{node.attr.value}" in LEGACY_NAMES


def _attribute(source: ParsedSource, node: cst.Attribute) -> Iterator[Site]:
    """Yield the site of a ``torch.quantization`` written out; deeper names keep their ending."""
    code, names = source.code(node), source.names(node)
    if len(names) != 1 or (name := next(iter(names))) not in NAMESPACES:
        return
    parent = source.parent(node)
    used = f"{name}.{parent.attr.value}" if isinstance(parent, cst.Attribute) else name
    new = new_namespace(used)
    if new is None or any(used == old or used.startswith(f"{old}.") for old in NAMESPACES if old != name):
        return
    site = Site("TQ104", source.start(node), code)
    request = ImportRequest("torch", offset=source.start(node))
    edit = Edit(source.start(node), source.end(node), NAMESPACES[name])
    yield site.settled(why_not_free(source, request), (edit,), (request,))


REWRITE = Finder("TQ104", find)
