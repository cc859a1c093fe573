"""Dotted names in LibCST nodes."""

from __future__ import annotations

import libcst as cst

__all__ = ["dotted", "imported_module", "names_in_import", "split_dotted"]


def imported_module(node: cst.ImportFrom) -> str:
    """Return the module of a from-import: ``..a.b`` for ``from ..a.b import c``."""
    return "." * len(node.relative) + (dotted(node.module) if node.module is not None else "")


def names_in_import(node: cst.Import | cst.ImportFrom) -> list[str]:
    """Return the full names that an import statement imports; ``module.*`` for ``import *``."""
    prefix = f"{imported_module(node)}." if isinstance(node, cst.ImportFrom) else ""
    if isinstance(node.names, cst.ImportStar):
        return [f"{prefix}*"]
    return [prefix + dotted(alias.name) for alias in node.names]


def dotted(node: cst.CSTNode) -> str:
    """Return ``a.b.c`` for such a chain of names, an empty string for anything else."""
    base, rest = split_dotted(node)
    return base.value + rest if base is not None else ""


def split_dotted(node: cst.CSTNode) -> tuple[cst.Name | None, str]:
    rest = ""
    while isinstance(node, cst.Attribute):
        rest = f".{node.attr.value}{rest}"
        node = node.value
    return (node, rest) if isinstance(node, cst.Name) else (None, rest)
