"""The package's modules as syntax trees, parsed once for all tests that read them; no test changes them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping
from pathlib import Path

import torchq_compat

__all__ = ["PACKAGE", "package_nodes", "package_trees", "spelled"]

PACKAGE = Path(torchq_compat.__file__).parent


@functools.cache
def package_trees() -> Mapping[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}


@functools.cache
def package_nodes() -> Mapping[Path, list[ast.AST]]:
    """Return all nodes of each module: going through the trees takes longer than looking at them."""
    return {path: list(ast.walk(tree)) for path, tree in package_trees().items()}


def spelled(node: ast.AST) -> str:
    """Return what ``ast.unparse`` does, which takes ten times as long for a dotted name."""
    inner, names = node, list[str]()
    while isinstance(inner, ast.Attribute):
        inner, names = inner.value, [inner.attr, *names]
    return ".".join([inner.id, *names]) if isinstance(inner, ast.Name) else ast.unparse(node)
