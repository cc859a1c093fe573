"""``torch.quantization``, ``torch.nn.quantized`` and related namespaces -> ``torch.ao``, where the objects
live.

They still work and are the same objects, so only files that use FX graph mode are touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import libcst as cst

from torchq_compat.migrate.legacy_api.construct import Construct
from torchq_compat.migrate.legacy_api.fx_calls import uses_fx
from torchq_compat.migrate.legacy_api.legacy_names import NAMESPACES, NOT_IN_NAMESPACES
from torchq_compat.migrate.rewrites.declaration import Rewrite
from torchq_compat.migrate.source.dotted_names import dotted, imported_module
from torchq_compat.migrate.source.imports import is_free
from torchq_compat.migrate.source.parsed_source import ParsedSource
from torchq_compat.migrate.source.sites import ImportRequest, Site
from torchq_compat.migrate.source.text_edits import Edit

__all__ = ["REWRITE"]


def find(source: ParsedSource) -> Iterator[Site]:
    if not uses_fx(source):
        return
    for node in source.nodes(cst.ImportFrom):
        if not isinstance(node.names, cst.ImportStar):
            yield from _import_from(source, node, node.names)
    for statement in source.nodes(cst.Import):
        for alias in statement.names:
            yield from _import(source, statement, alias)
    for attribute in source.nodes(cst.Attribute):
        yield from _attribute(source, attribute)


def new_namespace(name: str) -> str | None:
    """Return ``name`` under torch.ao, if it is an old namespace or lies in one."""
    for old, new in NAMESPACES.items():
        if name == old or name.startswith(f"{old}."):
            return None if _is_excluded(name) else new + name[len(old) :]
    return None


def _is_excluded(name: str) -> bool:
    parts = name.split(".")
    prefixes = {".".join(parts[:cut]) for cut in range(1, len(parts) + 1)}
    return not prefixes.isdisjoint(NOT_IN_NAMESPACES) or any(part.startswith("_") for part in parts)


def _import_from(
    source: ParsedSource, node: cst.ImportFrom, aliases: Sequence[cst.ImportAlias]
) -> Iterator[Site]:
    module = imported_module(node)
    full = [f"{module}.{dotted(alias.name)}" for alias in aliases]
    if not any(new_namespace(name) for name in full) or node.module is None:
        return
    site = Site("TQ104", source.start(node), f"from {module}")
    moved = {new.rpartition(".")[0] for name in full if (new := new_namespace(name))}
    uses = [use for alias in aliases for use in _attribute_uses(source, node, alias, module)]
    if not all(new_namespace(name) for name in full):
        yield replace(site, refusal="the statement also imports names that have not moved")
    elif any(_is_excluded(use) for use in uses):
        yield replace(site, refusal="not everything used of it is under torch.ao")
    else:
        yield replace(site, edits=(Edit(source.start(node.module), source.end(node.module), moved.pop()),))


def _import(source: ParsedSource, node: cst.Import, alias: cst.ImportAlias) -> Iterator[Site]:
    name = dotted(alias.name)
    new = new_namespace(name)
    if new is None:
        return
    site = Site("TQ104", source.start(alias), f"import {name}")
    if any(_is_excluded(use) for use in _attribute_uses(source, node, alias, "")):
        yield replace(site, refusal="not everything used of it is under torch.ao")
    else:
        yield replace(site, edits=(Edit(source.start(alias.name), source.end(alias.name), new),))


def _attribute_uses(
    source: ParsedSource, node: cst.Import | cst.ImportFrom, alias: cst.ImportAlias, module: str
) -> Iterator[str]:
    """Full names of what is used of an imported namespace."""
    name = dotted(alias.name)
    local = alias.evaluated_alias or name.partition(".")[0]
    for use in source.references(local, node):
        parent = source.parent(use)
        if isinstance(parent, cst.Attribute) and alias.asname is None and not module:
            continue  # import a.b: its uses are dotted and looked at one by one
        full = f"{module}.{name}" if module else name
        yield f"{full}.{parent.attr.value}" if isinstance(parent, cst.Attribute) else full


def _attribute(source: ParsedSource, node: cst.Attribute) -> Iterator[Site]:
    """Yield ``torch.quantization`` written out; deeper names follow it."""
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
    if not is_free(source, request):
        yield replace(site, refusal="the name torch means something else in this file")
        return
    edit = Edit(source.start(node), source.end(node), NAMESPACES[name])
    yield replace(site, edits=(edit,), imports=(request,))


CONSTRUCT = Construct(
    code="TQ104",
    title="old namespaces",
    becomes="the same object under torch.ao",
    guide="""\
`torch.quantization`, `torch.nn.intrinsic`, `torch.nn.qat`, `torch.nn.quantizable` and `torch.nn.quantized`
hand on the objects of their namesakes under `torch.ao`. Rewritten in files that use FX; other files are not
touched.
""",
)

REWRITE = Rewrite(
    name="old-namespaces",
    construct=CONSTRUCT,
    summary="torch.quantization and related namespaces are spelled torch.ao",
    find=find,
    order=10,
)
