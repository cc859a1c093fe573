"""Add the imports that rewritten code needs: each once, above its use, near related imports."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import libcst as cst

from torchq_compat.migrate.source.dotted_names import dotted, imported_module
from torchq_compat.migrate.source.moved_tables import MOVED
from torchq_compat.migrate.source.parsed_source import ParsedSource
from torchq_compat.migrate.source.sites import ImportRequest
from torchq_compat.migrate.source.text_edits import Edit

__all__ = ["import_edits", "is_free"]

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


def is_free(source: ParsedSource, request: ImportRequest) -> bool:
    """Return whether the name that ``request`` binds has no other meaning in the text."""
    name = request.name or request.module.partition(".")[0]
    if not source.binds(name):
        return True
    full = f"{request.module}.{name}" if request.name else name
    return all(full in _imported(node) for node in source.binders(name))


class _Place(NamedTuple):
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
    places: dict[tuple[int, str], tuple[_Place, ImportRequest]] = {}
    for request in sorted(requests, key=lambda request: request.offset):
        if not _is_satisfied(source, request):
            place = _place(source, request)
            places.setdefault((place.function, request.statement), (place, request))
    joined: dict[_Place, list[ImportRequest]] = {}
    for _, (place, request) in sorted(places.items()):
        joined.setdefault(place, []).append(request)
    return [_edit(source, place, wanted) for place, wanted in joined.items()]


def _edit(source: ParsedSource, place: _Place, requests: list[ImportRequest]) -> Edit:
    at = place.at
    if place.extends:
        return Edit(at, at, "".join(f", {request.name}" for request in requests))
    newline = source.newline()
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
        source.end(line) <= request.offset and (full, local) in list(_bindings(node))
        for line, node in _top_level_imports(source)
    )


def _place(source: ParsedSource, request: ImportRequest) -> _Place:
    """Return the place for an import: near the top imports from torch, or, if the file imports torch only in
    functions, in the function."""
    above = [(line, node) for line, node in _top_level_imports(source) if source.end(line) <= request.offset]
    for _, node in reversed(above):
        if request.name and isinstance(node, cst.ImportFrom) and imported_module(node) == request.module:
            assert not isinstance(node.names, cst.ImportStar)
            last = node.names[-1]
            return _Place(source.end(last) - _comma_length(source, last), extends=True)
    near = [line for line, node in above if _library(node) in LIBRARIES]
    local = _local_place(source, request.offset) if not near and _imports_locally(source) else None
    if local is not None:
        return local
    near = near or [line for line, _ in above]
    return _Place(_line_end(source, source.end(near[-1])) if near else _top(source))


def _imports_locally(source: ParsedSource) -> bool:
    return any(
        _library(node) in LIBRARIES for node in source.imports() if _function_around(source, node) is not None
    )


def _function_around(source: ParsedSource, node: cst.CSTNode) -> cst.FunctionDef | None:
    return next((a for a in source.ancestors(node) if isinstance(a, cst.FunctionDef)), None)


def _local_place(source: ParsedSource, offset: int) -> _Place | None:
    """Return the place in the function at ``offset``: before the statement of its body, so that every branch
    after it has the import; None outside functions."""
    around = [f for f in source.nodes(cst.FunctionDef) if source.start(f) <= offset < source.end(f)]
    body = around[-1].body if around else None
    if not isinstance(body, cst.IndentedBlock):
        return None
    statement = next(line for line in body.body if offset < source.end(line))
    start = source.start(statement)
    return _Place(
        _line_start(source, start), indent=source.indent_at(start), function=source.start(around[-1])
    )


def _comma_length(source: ParsedSource, alias: cst.ImportAlias) -> int:
    code = source.code(alias)
    return len(code.encode()) - len(code.rstrip().rstrip(",").rstrip().encode())


def _top(source: ParsedSource) -> int:
    """Return the offset after the docstring and the ``__future__`` imports, before other statements."""
    at = 0
    for index, statement in enumerate(source.module.body):
        small = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) else None
        is_docstring = (
            index == 0 and isinstance(small, cst.Expr) and isinstance(small.value, cst.SimpleString)
        )
        is_future = isinstance(small, cst.ImportFrom) and imported_module(small) == "__future__"
        if not is_docstring and not is_future:
            return at or _line_start(source, source.start(statement))
        at = _line_end(source, source.end(statement))
    return at


def _line_start(source: ParsedSource, offset: int) -> int:
    return max(source.data.rfind(b"\n", 0, offset), source.data.rfind(b"\r", 0, offset)) + 1


def _line_end(source: ParsedSource, offset: int) -> int:
    rest = source.data[offset:]
    lines = rest.splitlines(keepends=True)
    return offset + len(lines[0]) if lines else offset


def _top_level_imports(
    source: ParsedSource,
) -> Iterator[tuple[cst.SimpleStatementLine, cst.Import | cst.ImportFrom]]:
    for statement in source.module.body:
        if isinstance(statement, cst.SimpleStatementLine):
            for small in statement.body:
                is_star = isinstance(small, cst.ImportFrom) and isinstance(small.names, cst.ImportStar)
                if isinstance(small, (cst.Import, cst.ImportFrom)) and not is_star:
                    yield statement, small


def _bindings(node: cst.CSTNode) -> Iterator[tuple[str, str]]:
    """Yield (full name, local name) for each name that an import statement binds."""
    if not isinstance(node, (cst.Import, cst.ImportFrom)) or isinstance(node.names, cst.ImportStar):
        return
    prefix = f"{imported_module(node)}." if isinstance(node, cst.ImportFrom) else ""
    for alias in node.names:
        name = dotted(alias.name)
        yield SAME_OBJECT.get(prefix + name, prefix + name), alias.evaluated_alias or name


def _imported(node: cst.CSTNode) -> set[str]:
    """Return the full names that an import binds; for ``import a.b`` also ``a``, the name it binds."""
    full = {name for name, _ in _bindings(node)}
    return full | {name.partition(".")[0] for name in full} if isinstance(node, cst.Import) else full


def _library(node: cst.Import | cst.ImportFrom) -> str:
    module = imported_module(node) if isinstance(node, cst.ImportFrom) else dotted(node.names[0].name)
    return module.partition(".")[0]
