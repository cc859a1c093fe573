"""Rewrite import statements: keep some names, and import the others from another module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import libcst as cst

from torchq_compat.migrate.source.dotted_names import dotted, imported_module
from torchq_compat.migrate.source.parsed_source import ParsedSource
from torchq_compat.migrate.source.text_edits import Edit

__all__ = ["COMMENTS_BETWEEN_NAMES", "NewImport", "statement_edits"]

#: The reason not to rewrite a statement that would have to be split.
COMMENTS_BETWEEN_NAMES = "the import has comments between its names"


@dataclass(frozen=True, eq=False)
class NewImport:
    """The new import of one name of an import statement.

    Attributes:
        alias: the name in the old statement.
        module: the module it is imported from; empty for ``import x``.
        imported: the name, with its alias, in the new statement.
        keeps: another name that the old statement bound.
    """

    alias: cst.ImportAlias
    module: str
    imported: str
    keeps: str = ""


def statement_edits(
    source: ParsedSource, node: cst.Import | cst.ImportFrom, new: Sequence[NewImport]
) -> tuple[Edit, ...]:
    """Return the edits of ``node`` that import the names of ``new`` from their new modules; empty if comments
    would be lost."""
    if not new:
        return ()
    assert not isinstance(node.names, cst.ImportStar)
    modules = {name.module for name in new}
    if len(new) == len(node.names) and len(modules) == 1 and not any(name.keeps for name in new):
        return _edit_in_place(source, node, new)
    return _split(source, node, new)


def _split(
    source: ParsedSource, node: cst.Import | cst.ImportFrom, new: Sequence[NewImport]
) -> tuple[Edit, ...]:
    """Return the edit that splits the statement into the names that stay and those that moved."""
    if "#" in source.code(node):
        return ()
    assert not isinstance(node.names, cst.ImportStar)
    moved = {name.alias for name in new}
    kept = [_alias_code(alias) for alias in node.names if alias not in moved]
    kept += [name.keeps for name in new if name.keeps and not _imports_elsewhere(source, name.keeps, node)]
    kept = list(dict.fromkeys(kept))
    statements = [f"{_head(node)}{', '.join(kept)}"] if kept else []
    for module in dict.fromkeys(name.module for name in new):
        names = ", ".join(name.imported for name in new if name.module == module)
        statements.append(f"from {module} import {names}" if module else f"import {names}")
    line = source.parent(node)
    alone = isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1
    start = source.start(node)
    separator = source.newline() + source.indent_at(start) if alone else "; "
    return (Edit(start, source.end(node), separator.join(statements)),)


def _edit_in_place(
    source: ParsedSource, node: cst.Import | cst.ImportFrom, new: Sequence[NewImport]
) -> tuple[Edit, ...]:
    """Return edits of only the words that change, so that parentheses, line breaks and comments stay."""
    edits = []
    if isinstance(node, cst.ImportFrom):
        assert node.module is not None
        edits.append(Edit(source.start(node.module), source.end(node.module), new[0].module))
    for name in new:
        if name.imported != _alias_code(name.alias):
            end = source.end(name.alias.asname.name if name.alias.asname else name.alias.name)
            edits.append(Edit(source.start(name.alias), end, name.imported))
    return tuple(edits)


def _alias_code(alias: cst.ImportAlias) -> str:
    name, local = dotted(alias.name), alias.evaluated_alias
    return f"{name} as {local}" if local else name


def _head(node: cst.Import | cst.ImportFrom) -> str:
    return f"from {imported_module(node)} import " if isinstance(node, cst.ImportFrom) else "import "


def _imports_elsewhere(source: ParsedSource, name: str, node: cst.CSTNode) -> bool:
    """Return whether another top-level statement above ``node`` also binds ``name`` by a plain import."""
    return any(
        other is not node
        and source.start(other) < source.start(node)
        and source.is_top_level(other)
        and any(dotted(a.name).partition(".")[0] == name and a.asname is None for a in other.names)
        for other in source.nodes(cst.Import)
    )
