"""Where a mutant can be made, and what it makes of an expression: the usual operators of mutation testing."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "torchq_compat"

SWAPPED: dict[type[ast.AST], ast.AST] = {
    ast.Eq: ast.NotEq(),
    ast.NotEq: ast.Eq(),
    ast.Lt: ast.LtE(),
    ast.LtE: ast.Lt(),
    ast.Gt: ast.GtE(),
    ast.GtE: ast.Gt(),
    ast.Is: ast.IsNot(),
    ast.IsNot: ast.Is(),
    ast.In: ast.NotIn(),
    ast.NotIn: ast.In(),
    ast.And: ast.Or(),
    ast.Or: ast.And(),
    ast.Add: ast.Sub(),
    ast.Sub: ast.Add(),
    ast.Mult: ast.Add(),
    ast.FloorDiv: ast.Mult(),
    ast.Div: ast.Mult(),
}
#: Their parts cannot stand inside a conditional expression, or mean nothing when the program runs.
LEFT_ALONE = (ast.NamedExpr, ast.Yield, ast.YieldFrom, ast.Await, ast.Starred, ast.JoinedStr)


@dataclass(frozen=True)
class Mutant:
    """The expression at ``start:end`` of the bytes of ``path`` that becomes ``replacement``."""

    path: str
    line: int
    start: int
    end: int
    original: str
    replacement: str

    @property
    def room(self) -> str:
        return str(Path(self.path).parent)

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.original!r} -> {self.replacement!r}"


def mutated(node: ast.expr) -> ast.expr | None:
    """Return another expression for ``node``, or None for one that is left alone."""
    match node:
        case ast.Compare(left, [op], right) if type(op) in SWAPPED:
            return ast.Compare(left, [SWAPPED[type(op)]], right)  # type: ignore[list-item]
        case ast.BoolOp(op, values):
            return ast.BoolOp(SWAPPED[type(op)], values)  # type: ignore[arg-type]
        case ast.BinOp(left, op, right) if type(op) in SWAPPED:
            return ast.BinOp(left, SWAPPED[type(op)], right)  # type: ignore[arg-type]
        case ast.UnaryOp(ast.Not(), operand):
            return operand
        case ast.Constant(bool(value)):
            return ast.Constant(not value)
        case ast.Constant(int(value)):
            return ast.Constant(value + 1)
    return None


def _candidates(function: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield (expression, mutated) in the body of a function, without annotations and nested functions."""
    stack: list[ast.AST] = list(getattr(function, "body", []))
    while stack:
        node = stack.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.JoinedStr)):
            continue
        if isinstance(node, ast.AnnAssign):
            stack += [node.value] if node.value else []
            continue
        if isinstance(node, (ast.If, ast.While)) and not isinstance(
            node.test, ast.Compare | ast.BoolOp | ast.UnaryOp
        ):
            yield node.test, ast.UnaryOp(ast.Not(), node.test)
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Name | ast.Call):
            yield node.value, ast.Constant(None)
        if isinstance(node, ast.Expr):
            if isinstance(node.value, ast.Constant):
                continue
            yield node.value, ast.Constant(None)
        if isinstance(node, ast.expr) and (other := mutated(node)) is not None:
            yield node, other
        stack += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.pattern)]


def mutants_of(root: Path, path: Path) -> list[Mutant]:
    """Return every mutant of the functions in a file of the checkout ``root``."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for node, other in _candidates(function):
            if any(isinstance(part, LEFT_ALONE) for part in ast.walk(node)):
                continue
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            name = path.relative_to(root).as_posix()
            original = source[start:end].decode()
            found.append(
                Mutant(name, node.lineno, start, end, original, ast.unparse(ast.fix_missing_locations(other)))
            )
    return found


def draw(root: Path, seed: int, count: int) -> list[Mutant]:
    """Return ``count`` mutants of the checkout ``root``, each in another file: one of every folder of the
    package, the others from anywhere."""
    chance = random.Random(seed)
    files = sorted((root / PACKAGE).rglob("*.py"))
    chance.shuffle(files)
    rooms: dict[Path, list[Path]] = {}
    for path in files:
        rooms.setdefault(path.parent, []).append(path)
    order = [paths.pop(0) for paths in rooms.values()]
    order += [path for path in files if path not in set(order)]
    drawn: list[Mutant] = []
    for path in order:
        if len(drawn) < count and (mutants := mutants_of(root, path)):
            drawn.append(chance.choice(mutants))
    return drawn
