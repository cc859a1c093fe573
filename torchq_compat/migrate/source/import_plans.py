"""Plan the rewriting of moved names in an import statement, and of their uses in the file."""

from __future__ import annotations

from dataclasses import dataclass, replace

import libcst as cst

from torchq_compat.migrate.source.dotted_names import dotted
from torchq_compat.migrate.source.import_statements import NewImport
from torchq_compat.migrate.source.imports import is_free
from torchq_compat.migrate.source.moved_tables import MOVED, Moved
from torchq_compat.migrate.source.parsed_source import ParsedSource
from torchq_compat.migrate.source.sites import ImportRequest
from torchq_compat.migrate.source.text_edits import Edit

__all__ = ["Plan", "plan_module", "plan_name"]


@dataclass(frozen=True, eq=False)
class Plan:
    """The plan for one name of an import statement.

    Attributes:
        what: the name, for messages.
        new: the import that replaces it; None if the rewrite is refused, or done in another file.
        use_edits: the edits of its uses in this file, if they change.
        uses: attributes that need no edit of their own.
        refusal: why the name is not rewritten; empty if it is.
    """

    alias: cst.ImportAlias
    what: str
    new: NewImport | None = None
    use_edits: tuple[Edit, ...] = ()
    uses: tuple[cst.CSTNode, ...] = ()
    refusal: str = ""


def plan_name(source: ParsedSource, node: cst.CSTNode, alias: cst.ImportAlias, row: Moved, name: str) -> Plan:
    """Return the plan for ``alias``, which imports ``name`` from the legacy module of ``row``."""
    new_name, local = row.names[name], alias.evaluated_alias
    use_edits: tuple[Edit, ...] = ()
    if new_name == name:
        imported = f"{name} as {local}" if local else name
    elif local or source.binds(new_name) or name in source.taken_by_others or _is_listed(source, name):
        imported = f"{new_name} as {local or name}"
    else:
        imported = new_name
        uses = source.references(name, node)
        use_edits = tuple(Edit(source.start(use), source.end(use), new_name) for use in uses)
    return Plan(alias, name, NewImport(alias, row.replacement, imported), use_edits)


def plan_module(
    source: ParsedSource, node: cst.Import | cst.ImportFrom, alias: cst.ImportAlias, row: Moved
) -> Plan:
    """Return the plan for ``alias``, which imports the legacy module of ``row`` as an object."""
    if isinstance(node, cst.Import) and alias.asname is None:
        return _plan_dotted_import(source, alias, row)
    local = alias.evaluated_alias or dotted(alias.name)
    names = source.references(local, node)
    uses = [
        use
        for name in names
        if isinstance(use := source.parent(name), cst.Attribute) and use.attr.value in row.names
    ]
    plan = Plan(alias, row.legacy.rpartition(".")[2], uses=tuple(uses))
    refusal = _refuse_uses(row, local, names, source)
    if refusal:
        return replace(plan, refusal=refusal)
    use_edits = tuple(
        Edit(source.start(use.attr), source.end(use.attr), row.names[use.attr.value])
        for use in uses
        if row.names[use.attr.value] != use.attr.value
    )
    if isinstance(node, cst.Import):
        new = NewImport(alias, "", f"{row.replacement} as {local}")
    else:
        package, _, module = row.replacement.rpartition(".")
        new = NewImport(alias, package, f"{module} as {local}" if local != module else module)
    return replace(plan, new=new, use_edits=use_edits)


def _plan_dotted_import(source: ParsedSource, alias: cst.ImportAlias, row: Moved) -> Plan:
    """Return the plan for ``import torch.ao.quantization.quantize_fx``, which binds ``torch`` and has dotted
    uses."""
    plan = Plan(alias, row.legacy)
    edits, uses = [], []
    for node in source.nodes(cst.Attribute):
        if row.legacy not in source.names(node):
            continue
        use = source.parent(node)
        if not isinstance(use, cst.Attribute) or use.attr.value not in _names_in(row):
            return replace(plan, refusal=f"{source.code(use)} has no counterpart in {row.replacement}")
        if use.attr.value in row.names:
            uses.append(use)
            text = f"{row.replacement}.{row.names[use.attr.value]}"
            edits.append(Edit(source.start(use), source.end(use), text))
    if not is_free(source, ImportRequest(row.replacement)):
        return replace(plan, refusal="the name torchq_compat means something else in this file")
    new = NewImport(alias, "", row.replacement, keeps="torch")
    return replace(plan, new=new, use_edits=tuple(edits), uses=tuple(uses))


def _refuse_uses(row: Moved, local: str, uses: list[cst.Name], source: ParsedSource) -> str:
    for use in uses:
        parent = source.parent(use)
        if not isinstance(parent, cst.Attribute):
            return f"the module {local} itself is used at line {source.line(source.start(use))}"
        if parent.attr.value not in _names_in(row):
            return f"{local}.{parent.attr.value} has no counterpart in {row.replacement}"
    return ""


def _names_in(row: Moved) -> set[str]:
    """Return the names of the legacy module of ``row`` that have moved, to any module."""
    return {name for other in (*MOVED, row) if other.legacy == row.legacy for name in other.names}


def _is_listed(source: ParsedSource, name: str) -> bool:
    """Return whether a string of the file is ``name``, as in ``__all__`` and ``getattr``."""
    return any(string.raw_value == name for string in source.nodes(cst.SimpleString))
