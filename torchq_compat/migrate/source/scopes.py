"""LibCST's scopes in linear time: the names bound in each scope, without their uses.

LibCST links every use to every assignment of its name, and resolves the function of every call to find
``typing.cast``: both are quadratic in a file that binds one name often, such as a notebook of repeated cells.
"""

from __future__ import annotations

from typing import Any

import libcst as cst
from libcst.metadata import ScopeProvider
from libcst.metadata.scope_provider import ScopeVisitor

__all__ = ["ScopesWithoutUses"]

#: Functions whose string arguments are types, which LibCST parses.
TYPING_CALLS = ("NewType", "TypeVar", "cast")


class ScopesWithoutUses(ScopeProvider):
    """A ``ScopeProvider`` whose ``accesses`` and ``referents`` stay empty."""

    def visit_Module(self, node: cst.Module) -> bool | None:  # noqa: N802
        node.visit(_Visitor(self))
        return None


class _NoNames:
    def get_qualified_names_for(self, node: cst.CSTNode) -> set[Any]:
        return set()


class _Visitor(ScopeVisitor):
    def visit_Call(self, node: cst.Call) -> bool | None:  # noqa: N802
        name = node.func.attr if isinstance(node.func, cst.Attribute) else node.func
        if isinstance(name, cst.Name) and name.value in TYPING_CALLS:
            return super().visit_Call(node)
        scope = self.scope
        self.scope = _NoNames()  # type: ignore[assignment]
        try:
            return super().visit_Call(node)
        finally:
            self.scope = scope
