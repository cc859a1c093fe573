"""Names that moved to another module: the imports that bring them and the dotted uses of them.

Shared by the rewrites of imports. A local name never changes its meaning for other files: only where it comes
from does, except that a private name whose public successor has another name is renamed in the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import libcst as cst

from torchq_compat.migrate.imports import is_free
from torchq_compat.migrate.legacy_names import MOVED, Moved
from torchq_compat.migrate.parsed_source import ParsedSource, dotted, imported_module
from torchq_compat.migrate.sites import ImportRequest, Site
from torchq_compat.migrate.text_edits import Edit

__all__ = ["MovedNames"]


@dataclass(frozen=True)
class MovedNames:
    """Finds the sites of some rows of the table of moved names.

    Attributes:
        code: of the construct.
        rows: modules and their names.
        guests: rows of names that a module of another rewrite only happens to have.
    """

    code: str
    rows: tuple[Moved, ...]
    guests: tuple[Moved, ...] = ()

    @property
    def all_rows(self) -> tuple[Moved, ...]:
        return (*self.rows, *self.guests)

    def find(self, source: ParsedSource) -> Iterator[Site]:
        settled: set[cst.CSTNode] = set()
        for node in source.imports():
            for site, uses in self._import_sites(source, node):
                settled.update(uses)
                yield site
        for attribute in source.nodes(cst.Attribute):
            if attribute not in settled:
                yield from self._attribute_site(source, attribute)

    # --- imports ---

    def _import_sites(
        self, source: ParsedSource, node: cst.Import | cst.ImportFrom
    ) -> Iterator[tuple[Site, tuple[cst.CSTNode, ...]]]:
        """The sites of one import statement, each with the attributes it settles."""
        if isinstance(node.names, cst.ImportStar):
            assert isinstance(node, cst.ImportFrom)
            if any(row.legacy == imported_module(node) for row in self.rows):
                yield self._star(source, node), ()
            return
        found = [plan for alias in node.names if (plan := self._plan(source, node, alias))]
        movable = [plan for plan in found if not plan.refusal and not plan.elsewhere]
        edits = self._statement_edits(source, node, movable)
        for plan in found:
            site = Site(self.code, source.start(plan.alias), plan.what, refusal=plan.refusal)
            if plan in movable:
                refusal = "" if edits else "the import has comments between its names"
                uses = tuple(edit for each in movable for edit in each.use_edits)
                site = replace(site, edits=(*edits, *uses) if edits else (), refusal=refusal)
            yield site, plan.uses

    def _star(self, source: ParsedSource, node: cst.ImportFrom) -> Site:
        refusal = "import * brings names that have not moved; import those in use by name"
        return Site(self.code, source.start(node), f"from {imported_module(node)} import *", refusal=refusal)

    def _plan(
        self, source: ParsedSource, node: cst.Import | cst.ImportFrom, alias: cst.ImportAlias
    ) -> _Plan | None:
        prefix = f"{imported_module(node)}." if isinstance(node, cst.ImportFrom) else ""
        written = prefix + dotted(alias.name)
        full = source.follow(written)
        module, _, name = full.rpartition(".")
        for row in self.all_rows:
            if module == row.legacy and name in row.names and prefix:
                return self._plan_name(source, node, alias, row, name, elsewhere=full != written)
            if full == row.legacy and row in self.rows:
                return self._plan_module(source, node, alias, row, elsewhere=full != written)
        return None

    def _plan_name(
        self,
        source: ParsedSource,
        node: cst.CSTNode,
        alias: cst.ImportAlias,
        row: Moved,
        name: str,
        *,
        elsewhere: bool,
    ) -> _Plan:
        new_name, local = row.names[name], alias.evaluated_alias
        if elsewhere:
            return _Plan(alias, f"{name}, handed on by another file", elsewhere=True)
        plan = _Plan(alias, name, module=row.replacement)
        if new_name == name:
            return replace(plan, imported=f"{name} as {local}" if local else name)
        if local or source.binds(new_name) or name in source.taken_by_others or _is_listed(source, name):
            return replace(plan, imported=f"{new_name} as {local or name}")
        renamed = tuple(
            Edit(source.start(use), source.end(use), new_name) for use in source.references(name, node)
        )
        return replace(plan, imported=new_name, use_edits=renamed)

    def _plan_module(
        self,
        source: ParsedSource,
        node: cst.Import | cst.ImportFrom,
        alias: cst.ImportAlias,
        row: Moved,
        *,
        elsewhere: bool,
    ) -> _Plan | None:
        if elsewhere:
            return None
        if isinstance(node, cst.Import) and alias.asname is None:
            return self._plan_dotted_import(source, alias, row)
        local = alias.evaluated_alias or dotted(alias.name)
        uses = [
            use
            for name in source.references(local, node)
            if isinstance(use := source.parent(name), cst.Attribute) and use.attr.value in row.names
        ]
        plan = _Plan(alias, row.legacy.rpartition(".")[2], uses=tuple(uses))
        refusal = self._refuse_uses(row, local, source.references(local, node), source)
        if refusal:
            return replace(plan, refusal=refusal)
        renamed = tuple(
            Edit(source.start(use.attr), source.end(use.attr), row.names[use.attr.value])
            for use in uses
            if isinstance(use, cst.Attribute)
            and row.names.get(use.attr.value, use.attr.value) != use.attr.value
        )
        package, _, module = row.replacement.rpartition(".")
        asname = f" as {local}" if local != module or isinstance(node, cst.Import) else ""
        if isinstance(node, cst.Import):
            return replace(plan, imported=f"{row.replacement}{asname}", use_edits=renamed)
        return replace(plan, module=package, imported=f"{module}{asname}", use_edits=renamed)

    def _plan_dotted_import(self, source: ParsedSource, alias: cst.ImportAlias, row: Moved) -> _Plan:
        """``import torch.ao.quantization.quantize_fx``, which also binds ``torch``; its uses are edited
        one by one, like any other dotted use."""
        plan = _Plan(alias, row.legacy)
        uses = [node for node in source.nodes(cst.Attribute) if row.legacy in source.names(node)]
        for use in uses:
            parent = source.parent(use)
            if not isinstance(parent, cst.Attribute) or parent.attr.value not in _names_in(row.legacy):
                return replace(plan, refusal=f"{source.code(parent)} has no counterpart in {row.replacement}")
        if not is_free(source, ImportRequest(row.replacement)):
            return replace(plan, refusal="the name torchq_compat means something else in this file")
        return replace(plan, imported=row.replacement, keeps="torch")

    def _refuse_uses(self, row: Moved, local: str, uses: list[cst.Name], source: ParsedSource) -> str:
        for use in uses:
            parent = source.parent(use)
            if not isinstance(parent, cst.Attribute):
                return f"the module {local} itself is used at line {source.line(source.start(use))}"
            if parent.attr.value not in _names_in(row.legacy):
                return f"{local}.{parent.attr.value} has no counterpart in {row.replacement}"
        return ""

    def _statement_edits(
        self, source: ParsedSource, node: cst.Import | cst.ImportFrom, plans: list[_Plan]
    ) -> tuple[Edit, ...]:
        if not plans:
            return ()
        assert not isinstance(node.names, cst.ImportStar)
        modules = {plan.module for plan in plans}
        if len(plans) == len(node.names) and len(modules) == 1 and not any(plan.keeps for plan in plans):
            return _edit_in_place(source, node, plans)
        return self._split(source, node, plans)

    def _split(
        self, source: ParsedSource, node: cst.Import | cst.ImportFrom, plans: list[_Plan]
    ) -> tuple[Edit, ...]:
        """The statement in two or more: what stays, and what moved."""
        if "#" in source.code(node):
            return ()
        assert not isinstance(node.names, cst.ImportStar)
        moved = {plan.alias for plan in plans}
        kept = [_alias_code(alias) for alias in node.names if alias not in moved]
        kept += [
            plan.keeps for plan in plans if plan.keeps and not _imports_elsewhere(source, plan.keeps, node)
        ]
        kept = list(dict.fromkeys(kept))
        statements = [f"{_head(node)}{', '.join(kept)}"] if kept else []
        for module in dict.fromkeys(plan.module for plan in plans):
            names = ", ".join(plan.imported for plan in plans if plan.module == module)
            statements.append(f"from {module} import {names}" if module else f"import {names}")
        line = source.parent(node)
        alone = isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1
        start = source.start(node)
        separator = source.newline() + source.indent_at(start) if alone else "; "
        return (Edit(start, source.end(node), separator.join(statements)),)

    # --- dotted uses ---

    def _attribute_site(self, source: ParsedSource, node: cst.Attribute) -> Iterator[Site]:
        names = source.names(node)
        for row in self.all_rows:
            moved = {name for name in names if name in {f"{row.legacy}.{old}" for old in row.names}}
            if not moved or names != moved:
                continue
            (full,) = moved
            new_name = row.names[full.rpartition(".")[2]]
            yield self._replace_dotted(source, node, row, new_name)
            return

    def _replace_dotted(self, source: ParsedSource, node: cst.Attribute, row: Moved, new_name: str) -> Site:
        start = source.start(node)
        site = Site(self.code, start, source.code(node))
        if source.written_names(node) != source.names(node):
            return site
        request = ImportRequest(row.replacement, offset=start)
        if not is_free(source, request):
            return replace(site, refusal="the name torchq_compat means something else in this file")
        edit = Edit(start, source.end(node), f"{row.replacement}.{new_name}")
        return replace(site, edits=(edit,), imports=(request,))


@dataclass(frozen=True, eq=False)
class _Plan:
    """What becomes of one name of an import statement.

    Attributes:
        module: what it is imported from; empty for ``import x``.
        imported: the name, with its alias, in the new statement.
        keeps: what else the old statement bound.
        use_edits: renamed uses.
        uses: attributes that need no edit of their own.
        elsewhere: another file imports it; it is settled there.
    """

    alias: cst.ImportAlias
    what: str
    module: str = ""
    imported: str = ""
    keeps: str = ""
    use_edits: tuple[Edit, ...] = ()
    uses: tuple[cst.CSTNode, ...] = ()
    refusal: str = ""
    elsewhere: bool = False


def _edit_in_place(
    source: ParsedSource, node: cst.Import | cst.ImportFrom, plans: list[_Plan]
) -> tuple[Edit, ...]:
    """Only the words that change, so that parentheses, line breaks and comments stay."""
    edits = []
    if isinstance(node, cst.ImportFrom):
        assert node.module is not None
        edits.append(Edit(source.start(node.module), source.end(node.module), plans[0].module))
    for plan in plans:
        if plan.imported != _alias_code(plan.alias):
            end = source.end(plan.alias.asname.name if plan.alias.asname else plan.alias.name)
            edits.append(Edit(source.start(plan.alias), end, plan.imported))
    return tuple(edits)


def _alias_code(alias: cst.ImportAlias) -> str:
    name, local = dotted(alias.name), alias.evaluated_alias
    return f"{name} as {local}" if local else name


def _head(node: cst.Import | cst.ImportFrom) -> str:
    return f"from {imported_module(node)} import " if isinstance(node, cst.ImportFrom) else "import "


def _imports_elsewhere(source: ParsedSource, name: str, node: cst.CSTNode) -> bool:
    """Whether another top-level statement above ``node`` also binds ``name`` by a plain import."""
    return any(
        other is not node
        and source.start(other) < source.start(node)
        and source.is_top_level(other)
        and any(dotted(a.name).partition(".")[0] == name and a.asname is None for a in other.names)
        for other in source.nodes(cst.Import)
    )


def _names_in(module: str) -> set[str]:
    """The names of a legacy module that have moved, wherever to."""
    return {name for row in MOVED if row.legacy == module for name in row.names}


def _is_listed(source: ParsedSource, name: str) -> bool:
    """Whether a text of the file spells ``name``, as ``__all__`` and ``getattr`` do."""
    return any(string.raw_value == name for string in source.nodes(cst.SimpleString))
