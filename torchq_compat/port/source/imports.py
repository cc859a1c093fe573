"""Imports of a source: those that rewritten code needs, and those whose names moved, with their uses."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import libcst as cst

from torchq_compat.port.constructs import Edit, ImportRequest, Site
from torchq_compat.port.names import MOVED, Moved
from torchq_compat.port.source.parsed import ImportStatement, ParsedSource, imported_module, named_aliases

# Add the imports that rewritten code needs: each once, above its use, near related imports.


LIBRARIES = ("torch", "torchq_compat")
#: Full name -> another full name of the same object.
SAME_OBJECT = {
    "torch.ao.quantization.qconfig_mapping.QConfigMapping": "torch.ao.quantization.QConfigMapping",
    "torch.ao.quantization.quantize_fx.QConfigMapping": "torch.ao.quantization.QConfigMapping",
    **{
        f"{moved.legacy}.{name}": f"{moved.replacement}.{new_name}"
        for moved in MOVED
        for name, new_name in moved.names.items()
    },
}


def why_not_free(source: ParsedSource, request: ImportRequest) -> str:
    """Return that the name which ``request`` binds has another meaning in the text; empty if it has none."""
    name = request.name or request.module.partition(".")[0]
    full = f"{request.module}.{name}" if request.name else name
    if all(full in _imported(node) for node in source.binders(name)):
        return ""
    return f"the name {name} means something else in this file"


class _ImportPosition(NamedTuple):
    """The place for a new import.

    Attributes:
        at: byte offset.
        extends: whether ``at`` is inside a ``from ... import`` to which the name is added.
        indent: the indent of a new line.
        function: offset of the function that gets the import, -1 for the whole file.
    """

    at: int
    extends: bool = False
    indent: str = ""
    function: int = -1


def import_edits(source: ParsedSource, requests: Iterable[ImportRequest]) -> list[Edit]:
    """Return the edits of ``source`` that satisfy all ``requests``, each import once per file or per
    function."""
    places: dict[tuple[int, str], tuple[_ImportPosition, ImportRequest]] = {}
    for request in sorted(requests, key=lambda request: request.offset):
        if not _is_satisfied(source, request):
            place = _place(source, request)
            places.setdefault((place.function, request.statement), (place, request))
    joined: dict[_ImportPosition, list[ImportRequest]] = {}
    for _, (place, request) in sorted(places.items()):
        joined.setdefault(place, []).append(request)
    return [_edit(source, place, expected) for place, expected in joined.items()]


def _edit(source: ParsedSource, place: _ImportPosition, requests: list[ImportRequest]) -> Edit:
    at = place.at
    if place.extends:
        return Edit(at, at, "".join(f", {request.name}" for request in requests))
    newline = source.module.default_newline
    lines = "".join(place.indent + statement + newline for statement in _statements(requests))
    # If the last line of the file has no newline, add one first.
    before = source.data[:at]
    return Edit(at, at, lines if not before or before.endswith((b"\n", b"\r")) else newline + lines)


def _statements(requests: list[ImportRequest]) -> Iterator[str]:
    """Yield the import statements: first each ``import module``, then one line per module with its names."""
    yield from (request.statement for request in requests if not request.name)
    modules = dict.fromkeys(request.module for request in requests if request.name)
    for module in modules:
        names = [request.name for request in requests if request.name and request.module == module]
        yield f"from {module} import {', '.join(names)}"


def _is_satisfied(source: ParsedSource, request: ImportRequest) -> bool:
    full = f"{request.module}.{request.name}" if request.name else request.module
    local = request.name or request.module
    return any(
        source.end(line) <= request.offset and (full, local) in _bindings(node)
        for line, node in _top_level_imports(source)
    )


def _place(source: ParsedSource, request: ImportRequest) -> _ImportPosition:
    """Return the place for an import: near the top imports from torch, or, if the file imports torch only in
    functions, in the function."""
    above = [(line, node) for line, node in _top_level_imports(source) if source.end(line) <= request.offset]
    for _, node in reversed(above):
        if request.name and isinstance(node, cst.ImportFrom) and imported_module(node) == request.module:
            assert not isinstance(node.names, cst.ImportStar)
            last = source.code(node.names[-1]).rstrip().rstrip(",").rstrip()
            return _ImportPosition(source.start(node.names[-1]) + len(last.encode()), extends=True)
    near = [line for line, node in above if _library(node) in LIBRARIES]
    uses = (node for node in source.imports() if _library(node) in LIBRARIES)
    is_local = any(isinstance(above, cst.FunctionDef) for node in uses for above in source.ancestors(node))
    local = _local_place(source, request.offset) if not near and is_local else None
    if local is not None:
        return local
    near = near or [line for line, _ in above]
    return _ImportPosition(source.line_end(source.end(near[-1])) if near else _top(source))


def _local_place(source: ParsedSource, offset: int) -> _ImportPosition | None:
    """Return the place in the function at ``offset``: before the statement of its body, so that every branch
    after it has the import; None outside functions."""
    around = [f for f in source.nodes(cst.FunctionDef) if source.start(f) <= offset < source.end(f)]
    body = around[-1].body if around else None
    if not isinstance(body, cst.IndentedBlock):
        return None
    statement = next(line for line in body.body if offset < source.end(line))
    start = source.start(statement)
    return _ImportPosition(
        source.line_start(start), indent=source.indent_at(start), function=source.start(around[-1])
    )


def _top(source: ParsedSource) -> int:
    """Return the offset after the docstring and the ``__future__`` imports, before other statements."""
    at = 0
    for index, statement in enumerate(source.module.body):
        match statement:
            case cst.SimpleStatementLine([cst.Expr(cst.SimpleString()), *_]) if index == 0:
                pass
            case cst.SimpleStatementLine([cst.ImportFrom(cst.Name("__future__")), *_]):
                pass
            case _:
                return at or source.line_start(source.start(statement))
        at = source.line_end(source.end(statement))
    return at


def _top_level_imports(
    source: ParsedSource,
) -> Iterator[tuple[cst.SimpleStatementLine, ImportStatement]]:
    for statement in source.module.body:
        if isinstance(statement, cst.SimpleStatementLine):
            for small in statement.body:
                is_star = isinstance(small, cst.ImportFrom) and isinstance(small.names, cst.ImportStar)
                if isinstance(small, (cst.Import, cst.ImportFrom)) and not is_star:
                    yield statement, small


def _bindings(node: cst.CSTNode) -> Iterator[tuple[str, str]]:
    """Yield (full name, local name) for each name that an import statement binds."""
    if isinstance(node, (cst.Import, cst.ImportFrom)):
        for alias, full in named_aliases(node):
            yield SAME_OBJECT.get(full, full), alias.evaluated_alias or alias.evaluated_name


def _imported(node: cst.CSTNode) -> set[str]:
    """Return the full names that an import binds; for ``import a.b`` also ``a``, the name it binds."""
    full = {name for name, _ in _bindings(node)}
    return full | {name.partition(".")[0] for name in full} if isinstance(node, cst.Import) else full


def _library(node: ImportStatement) -> str:
    module = imported_module(node) if isinstance(node, cst.ImportFrom) else node.names[0].evaluated_name
    return module.partition(".")[0]


# Rewrite import statements: keep some names, and import the others from another module.


#: The reason not to rewrite a statement that would have to be split.
COMMENTS_BETWEEN_NAMES = "the import has comments between its names"


@dataclass(frozen=True, eq=False)
class NewImport:
    """The plan for one name of an import statement.

    Attributes:
        alias: the name in the old statement.
        module: the module it is imported from; empty for ``import x``.
        imported: the name, with its alias, in the new statement; empty if the rewrite is refused, or done in
            another file.
        keeps: another name that the old statement bound.
        what: the name, for messages.
        use_edits: the edits of its uses in this file, if they change.
        uses: attributes that need no edit of their own.
        refusal: why the name is not rewritten; empty if it is.
    """

    alias: cst.ImportAlias
    module: str = ""
    imported: str = ""
    keeps: str = ""
    what: str = ""
    use_edits: tuple[Edit, ...] = ()
    uses: tuple[cst.CSTNode, ...] = ()
    refusal: str = ""


def statement_edits(
    source: ParsedSource, node: ImportStatement, new: Sequence[NewImport]
) -> tuple[Edit, ...]:
    """Return the edits of ``node`` that import the names of ``new`` from their new modules; empty if comments
    would be lost."""
    if not new:
        return ()
    assert not isinstance(node.names, cst.ImportStar)
    modules = dict.fromkeys(name.module for name in new)
    start = source.start(node)
    if len(new) == len(node.names) and len(modules) == 1 and not any(name.keeps for name in new):
        # Only the words that change are edited, so that parentheses, line breaks and comments stay.
        edits = []
        if isinstance(node, cst.ImportFrom):
            assert node.module is not None
            edits.append(source.edit(node.module, new[0].module))
        for name in new:
            if name.imported != _alias_code(name.alias):
                end = source.end(name.alias.asname.name if name.alias.asname else name.alias.name)
                edits.append(Edit(source.start(name.alias), end, name.imported))
        return tuple(edits)
    if "#" in source.code(node):
        return ()
    moved = {name.alias for name in new}
    kept = [_alias_code(alias) for alias in node.names if alias not in moved]
    kept += [name.keeps for name in new if name.keeps and not _imports_elsewhere(source, name.keeps, node)]
    head = f"from {imported_module(node)} import " if isinstance(node, cst.ImportFrom) else "import "
    statements = [f"{head}{', '.join(dict.fromkeys(kept))}"] if kept else []
    for module in modules:
        names = ", ".join(name.imported for name in new if name.module == module)
        statements.append(f"from {module} import {names}" if module else f"import {names}")
    line = source.parent(node)
    alone = isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1
    separator = source.module.default_newline + source.indent_at(start) if alone else "; "
    return (source.edit(node, separator.join(statements)),)


def moved_modules(
    source: ParsedSource,
    code: str,
    now: Callable[[cst.ImportFrom, cst.ImportAlias], tuple[str, str] | None],
    of_import: Callable[[ParsedSource, cst.Import, cst.ImportAlias], Iterator[Site]],
    of_attribute: Callable[[ParsedSource, cst.Attribute], Iterator[Site]],
) -> Iterator[Site]:
    """Yield the sites of names from modules that moved.

    Args:
        now: the module and the name that a name of a from-import has now; None if it did not move.
        of_import: yields the sites of one name of ``import ...``.
        of_attribute: yields the sites of a dotted name.
    """
    for node in source.imports():
        if isinstance(node, cst.Import):
            for alias in node.names:
                yield from of_import(source, node, alias)
        elif not isinstance(node.names, cst.ImportStar):
            places = ((alias, now(node, alias)) for alias in node.names)
            moving = [_from_new_place(alias, *place) for alias, place in places if place is not None]
            edits = statement_edits(source, node, moving)
            if moving:
                site = Site(code, source.start(node), f"from {imported_module(node)}")
                yield site.settled("" if edits else COMMENTS_BETWEEN_NAMES, edits)
    for attribute in source.nodes(cst.Attribute):
        yield from of_attribute(source, attribute)


def _from_new_place(alias: cst.ImportAlias, module: str, name: str) -> NewImport:
    old, local = alias.evaluated_name, alias.evaluated_alias
    return NewImport(alias, module, _renamed(name, local or (old if name != old else None)))


def _alias_code(alias: cst.ImportAlias) -> str:
    return _renamed(alias.evaluated_name, alias.evaluated_alias)


def _renamed(name: str, local: str | None) -> str:
    return f"{name} as {local}" if local else name


def _imports_elsewhere(source: ParsedSource, name: str, node: cst.CSTNode) -> bool:
    """Return whether another top-level statement above ``node`` also binds ``name`` by a plain import."""
    return any(
        other is not node
        and source.start(other) < source.start(node)
        and isinstance(other, cst.Import)
        and any(a.evaluated_name.partition(".")[0] == name and a.asname is None for a in other.names)
        for _, other in _top_level_imports(source)
    )


# Plan the rewriting of moved names in an import statement, and of their uses in the file.


def plan_name(
    source: ParsedSource, node: cst.CSTNode, alias: cst.ImportAlias, row: Moved, name: str
) -> NewImport:
    """Return the plan for ``alias``, which imports ``name`` from the legacy module of ``row``."""
    new_name, local = row.names[name], alias.evaluated_alias
    use_edits: tuple[Edit, ...] = ()
    if new_name == name:
        imported = _renamed(name, local)
    elif local or source.binders(new_name) or name in source.taken_by_others or _is_listed(source, name):
        imported = f"{new_name} as {local or name}"
    else:
        imported = new_name
        uses = source.references(name, node)
        use_edits = tuple(source.edit(use, new_name) for use in uses)
    return NewImport(alias, row.replacement, imported, what=name, use_edits=use_edits)


def plan_module(source: ParsedSource, node: ImportStatement, alias: cst.ImportAlias, row: Moved) -> NewImport:
    """Return the plan for ``alias``, which imports the legacy module of ``row`` as an object."""
    if isinstance(node, cst.Import) and alias.asname is None:
        return _plan_dotted_import(source, alias, row)
    local = alias.evaluated_alias or alias.evaluated_name
    names = source.references(local, node)
    attributes = [use for name in names if isinstance(use := source.parent(name), cst.Attribute)]
    uses = [use for use in attributes if use.attr.value in row.names]
    plan = NewImport(alias, what=row.legacy.rpartition(".")[2], uses=tuple(uses))
    if refusal := _refuse_uses(row, local, names, source):
        return replace(plan, refusal=refusal)
    use_edits = tuple(source.edit(use.attr, row.names[use.attr.value]) for use in uses)
    if isinstance(node, cst.Import):
        return replace(plan, imported=f"{row.replacement} as {local}", use_edits=use_edits)
    package, _, module = row.replacement.rpartition(".")
    imported = f"{module} as {local}" if local != module else module
    return replace(plan, module=package, imported=imported, use_edits=use_edits)


def _plan_dotted_import(source: ParsedSource, alias: cst.ImportAlias, row: Moved) -> NewImport:
    """Return the plan for ``import torch.ao.quantization.quantize_fx``, which binds ``torch`` and has dotted
    uses."""
    plan = NewImport(alias, what=row.legacy)
    edits, uses = [], []
    for node in source.nodes(cst.Attribute):
        if row.legacy not in source.names(node):
            continue
        use = source.parent(node)
        if not isinstance(use, cst.Attribute) or use.attr.value not in _names_in(row):
            return replace(plan, refusal=f"{source.code(use)} has no counterpart in {row.replacement}")
        if use.attr.value in row.names:
            uses.append(use)
            edits.append(source.edit(use, f"{row.replacement}.{row.names[use.attr.value]}"))
    if refusal := why_not_free(source, ImportRequest(row.replacement)):
        return replace(plan, refusal=refusal)
    plan = replace(plan, imported=row.replacement, keeps="torch")
    return replace(plan, use_edits=tuple(edits), uses=tuple(uses))


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


# Names that moved to another module: find their imports and their dotted uses.
#
# The rewrites of imports share this. A local name keeps its meaning for other files, only its origin changes;
# but a private name whose public successor has another name is renamed in the file.


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

    def find(self, source: ParsedSource) -> Iterator[Site]:
        settled: set[cst.CSTNode] = set()
        for node in source.imports():
            for site, uses in self._import_sites(source, node):
                settled.update(uses)
                yield site
        for attribute in source.nodes(cst.Attribute):
            names = source.names(attribute)
            row = self._row_with(*names) if len(names) == 1 else None
            if row is not None and attribute not in settled:
                yield self._replace_dotted(source, attribute, row, *names)

    def _row_with(self, full: str) -> Moved | None:
        """Return the row that has the name ``full``."""
        module, _, name = full.rpartition(".")
        rows = (row for row in (*self.rows, *self.guests) if module == row.legacy and name in row.names)
        return next(rows, None)

    # --- imports ---

    def _import_sites(
        self, source: ParsedSource, node: ImportStatement
    ) -> Iterator[tuple[Site, tuple[cst.CSTNode, ...]]]:
        """Yield the sites of one import statement, each with the attributes whose uses it handles."""
        if isinstance(node.names, cst.ImportStar):
            assert isinstance(node, cst.ImportFrom)
            if any(row.legacy == imported_module(node) for row in self.rows):
                refusal = "import * brings names that have not moved; import those in use by name"
                what = f"from {imported_module(node)} import *"
                yield Site(self.code, source.start(node), what, refusal=refusal), ()
            return
        plans = [plan for item in named_aliases(node) if (plan := self._plan(source, node, *item))]
        movable = [plan for plan in plans if plan.imported]
        edits = statement_edits(source, node, movable)
        uses = tuple(edit for plan in movable for edit in plan.use_edits)
        for plan in plans:
            site = Site(self.code, source.start(plan.alias), plan.what)
            refusal = COMMENTS_BETWEEN_NAMES if plan.imported and not edits else plan.refusal
            yield site.settled(refusal, (*edits, *uses) if plan.imported else ()), plan.uses

    def _plan(
        self, source: ParsedSource, node: ImportStatement, alias: cst.ImportAlias, written: str
    ) -> NewImport | None:
        full = source.follow(written)
        name, row = full.rpartition(".")[2], self._row_with(full)
        if row is not None and isinstance(node, cst.ImportFrom):
            if full != written:
                return NewImport(alias, what=f"{name}, re-exported by another file")
            return plan_name(source, node, alias, row, name)
        row = next((row for row in self.rows if row.legacy == full == written), None)
        return plan_module(source, node, alias, row) if row is not None else None

    # --- dotted uses ---

    def _replace_dotted(self, source: ParsedSource, node: cst.Attribute, row: Moved, full: str) -> Site:
        start, new_name = source.start(node), row.names[full.rpartition(".")[2]]
        site = Site(self.code, start, source.code(node))
        if source.written_names(node) != source.names(node):
            return site
        request = ImportRequest(row.replacement, offset=start)
        comment = "there is a comment in the middle of the name" if source.has_comment(node) else ""
        edit = source.edit(node, f"{row.replacement}.{new_name}")
        return site.settled(comment or why_not_free(source, request), (edit,), (request,))
