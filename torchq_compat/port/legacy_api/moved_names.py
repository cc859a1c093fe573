"""Names that moved to another module: find their imports and their dotted uses.

The rewrites of imports share this module. A local name keeps its meaning for other files, only its origin
changes; but a private name whose public successor has another name is renamed in the file.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst

from torchq_compat.port.constructs import Edit, ImportRequest, Site
from torchq_compat.port.source import imports
from torchq_compat.port.source.moved_tables import Moved
from torchq_compat.port.source.parsed import ParsedSource, dotted, imported_module


@dataclass(frozen=True)
class MovedNames:
    """Finds the sites of some rows of the table of moved names.

    Attributes:
        code: the code of the construct.
        rows: modules and their names.
        guests: rows of names handled here although their module belongs to another rewrite.
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
        """Yield the sites of one import statement, each with the attributes whose uses it handles."""
        if isinstance(node.names, cst.ImportStar):
            assert isinstance(node, cst.ImportFrom)
            if any(row.legacy == imported_module(node) for row in self.rows):
                yield self._star(source, node), ()
            return
        plans = [plan for alias in node.names if (plan := self._plan(source, node, alias))]
        movable = [plan for plan in plans if plan.new]
        edits = imports.statement_edits(source, node, [plan.new for plan in movable if plan.new])
        uses = tuple(edit for plan in movable for edit in plan.use_edits)
        for plan in plans:
            site = Site(self.code, source.start(plan.alias), plan.what)
            refusal = imports.COMMENTS_BETWEEN_NAMES if plan.new and not edits else plan.refusal
            yield site.settled(refusal, (*edits, *uses) if plan.new else ()), plan.uses

    def _star(self, source: ParsedSource, node: cst.ImportFrom) -> Site:
        refusal = "import * brings names that have not moved; import those in use by name"
        return Site(self.code, source.start(node), f"from {imported_module(node)} import *", refusal=refusal)

    def _plan(
        self, source: ParsedSource, node: cst.Import | cst.ImportFrom, alias: cst.ImportAlias
    ) -> imports.ImportChange | None:
        prefix = f"{imported_module(node)}." if isinstance(node, cst.ImportFrom) else ""
        written = prefix + dotted(alias.name)
        full = source.follow(written)
        module, _, name = full.rpartition(".")
        for row in self.all_rows:
            if module == row.legacy and name in row.names and prefix:
                if full != written:
                    return imports.ImportChange(alias, f"{name}, re-exported by another file")
                return imports.plan_name(source, node, alias, row, name)
            if full == row.legacy and row in self.rows:
                return imports.plan_module(source, node, alias, row) if full == written else None
        return None

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
        comment = "there is a comment in the middle of the name" if source.has_comment(node) else ""
        edit = Edit(start, source.end(node), f"{row.replacement}.{new_name}")
        return site.settled(comment or imports.why_not_free(source, request), (edit,), (request,))
