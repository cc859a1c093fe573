"""A parsed Python text: its nodes, their positions, and the full names that they mean."""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import cache, cached_property
from typing import Any, TypeVar, cast

import libcst as cst
from libcst import metadata
from libcst.helpers import get_full_name_for_node_or_raise
from libcst.metadata import MetadataWrapper
from libcst.metadata.scope_provider import ScopeVisitor

from torchq_compat.port.constructs import Edit

ImportStatement = cst.Import | cst.ImportFrom

# LibCST's scopes in linear time: the names bound in each scope, without their uses.
#
# LibCST links every use to every assignment of its name, and resolves the function of every call to find
# uses in the strings of ``typing.cast``: both are quadratic in a file that binds one name often, such as a
# notebook of repeated cells.


class ScopesWithoutUses(metadata.ScopeProvider):
    """A ``ScopeProvider`` whose ``accesses`` and ``referents`` stay empty."""

    def visit_Module(self, node: cst.Module) -> bool | None:  # noqa: N802
        node.visit(_Visitor(self))
        return None


class _NoNames:
    def get_qualified_names_for(self, node: cst.CSTNode) -> set[Any]:
        return set()


class _Visitor(ScopeVisitor):
    def visit_Call(self, node: cst.Call) -> bool | None:  # noqa: N802
        scope, self.scope = self.scope, _NoNames()  # type: ignore[assignment]
        goes_on = super().visit_Call(node)
        self.scope = scope
        return goes_on


# Dotted names in LibCST nodes.


def imported_module(node: cst.ImportFrom) -> str:
    """Return the module of a from-import: ``..a.b`` for ``from ..a.b import c``."""
    return "." * len(node.relative) + (get_full_name_for_node_or_raise(node.module) if node.module else "")


def named_aliases(node: ImportStatement) -> Iterator[tuple[cst.ImportAlias, str]]:
    """Yield the names of an import statement, each with its full name; ``import *`` has none."""
    module = imported_module(node) if isinstance(node, cst.ImportFrom) else ""
    for alias in () if isinstance(node.names, cst.ImportStar) else node.names:
        yield alias, name_in(module, alias.evaluated_name)


def name_in(module: str, name: str) -> str:
    """Return the full name of ``name`` in ``module``, which may be the dots of a relative import alone."""
    return f"{module}.{name}" if module.strip(".") else module + name


def names_in_import(node: ImportStatement) -> list[str]:
    """Return the full names that an import statement imports; ``module.*`` for ``import *``."""
    if isinstance(node, cst.ImportFrom) and isinstance(node.names, cst.ImportStar):
        return [name_in(imported_module(node), "*")]
    return [full for _, full in named_aliases(node)]


def split_dotted(node: cst.CSTNode) -> tuple[cst.Name | None, str]:
    remaining = ""
    while isinstance(node, cst.Attribute):
        remaining = f".{node.attr.value}{remaining}"
        node = node.value
    return (node, remaining) if isinstance(node, cst.Name) else (None, remaining)


# A parsed Python text: its nodes, their positions, and the full names that they mean.
#
# LibCST parses the text and provides the scopes; this module adds names bound by assignment, names from
# ``import *``, and names that another file of the tree re-exports.


NodeT = TypeVar("NodeT", bound=cst.CSTNode)
#: Full name -> the full name it means, if another file of the tree re-exports it.
Follow = Callable[[str], str]
MAX_ALIASES = 8
LINE_END = re.compile(rb"\r\n|\r|\n")


class ParsedSource:
    """A parsed Python text.

    Args:
        text: the text.
        follow: resolves names that come from other files; default: they are not resolved.
        taken_by_others: top-level names that other files of the tree import from this one.

    Raises:
        cst.ParserSyntaxError: ``text`` is not valid Python.
    """

    def __init__(
        self, text: str, follow: Follow | None = None, taken_by_others: frozenset[str] = frozenset()
    ) -> None:
        self.text = text
        self.data = text.encode()
        self.taken_by_others = taken_by_others
        self.follow = cache(follow or (lambda name: name))
        self.module = cst.parse_module(text)
        wrapper = MetadataWrapper(self.module, unsafe_skip_copy=True)
        # One after the other they walk through the tree once more.
        wrapper.resolve_many((metadata.ByteSpanPositionProvider, ScopesWithoutUses))
        self._spans = wrapper.resolve(metadata.ByteSpanPositionProvider)
        self._scopes = wrapper.resolve(ScopesWithoutUses)
        self._parents = _parents(self.module)
        self._by_class: dict[type[cst.CSTNode], list[cst.CSTNode]] = {}
        for node in self._parents:
            self._by_class.setdefault(type(node), []).append(node)
        #: The full dotted names that a Name or an Attribute may mean; none if it comes from no import.
        self.names = cache(self._followed_names)
        # All uses of a name in a scope mean the same; the caches avoid quadratic time if it is bound often.
        self._names_in = cache(self._names_in_scope)
        self._binding_nodes = cache(self._nodes_that_bind)

    def nodes(self, *kinds: type[NodeT]) -> list[NodeT]:
        """Return all nodes of exactly these classes, in text order."""
        result = [cast(NodeT, node) for kind in kinds for node in self._by_class.get(kind, ())]
        return sorted(result, key=lambda node: (self.start(node), -self.end(node)))

    def imports(self) -> list[ImportStatement]:
        return self.nodes(cst.Import, cst.ImportFrom)

    def parent(self, node: cst.CSTNode) -> cst.CSTNode:
        return self._parents[node]

    def ancestors(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield the ancestors of ``node``, the nearest first."""
        while node is not self.module:
            node = self._parents[node]
            yield node

    def start(self, node: cst.CSTNode) -> int:
        """Return the offset of the first byte of ``node`` in ``data``."""
        return self._spans[node].start

    def end(self, node: cst.CSTNode) -> int:
        return self._spans[node].start + self._spans[node].length

    def code(self, node: cst.CSTNode) -> str:
        """Return the text of ``node``, without parentheses around it."""
        return self.data[self.start(node) : self.end(node)].decode()

    def full_code(self, node: cst.BaseExpression) -> str:
        """Return the text of an expression with the parentheses that belong to it."""
        start = self.start(node.lpar[0]) if node.lpar else self.start(node)
        return self.data[start : self.full_end(node)].decode()

    def full_end(self, node: cst.BaseExpression) -> int:
        """Return the end offset of an expression, including the parentheses that belong to it."""
        return self.end(node.rpar[-1]) if node.rpar else self.end(node)

    def edit(self, node: cst.CSTNode, text: str) -> Edit:
        """Return the edit that puts ``text`` in the place of ``node``."""
        return Edit(self.start(node), self.end(node), text)

    def has_comment(self, node: cst.CSTNode) -> bool:
        """Return whether there is a comment within ``node``."""
        return any(node in self.ancestors(comment) for comment in self.nodes(cst.Comment))

    def line(self, offset: int) -> int:
        """Return the line, from 1, of a byte offset."""
        return bisect_right(self._line_ends, offset) + 1

    def column(self, offset: int) -> int:
        """Return the column, from 1, of a byte offset, counted in characters."""
        return len(self.line_before(offset)) + 1

    def line_start(self, offset: int) -> int:
        """Return the offset at which the line of a byte offset starts."""
        index = bisect_right(self._line_ends, offset)
        return self._line_ends[index - 1] if index else 0

    def line_end(self, offset: int) -> int:
        """Return the offset behind the line of a byte offset."""
        index = bisect_right(self._line_ends, offset)
        return self._line_ends[index] if index < len(self._line_ends) else len(self.data)

    @cached_property
    def _line_ends(self) -> list[int]:
        return [match.end() for match in LINE_END.finditer(self.data)]

    @cached_property
    def _names_by_value(self) -> dict[str, list[cst.Name]]:
        """Name -> the nodes of it that refer to something."""
        matches: dict[str, list[cst.Name]] = {}
        for node in self.nodes(cst.Name):
            if not self._is_no_reference(node):
                matches.setdefault(node.value, []).append(node)
        return matches

    def scope(self, node: cst.CSTNode) -> metadata.Scope | None:
        return self._scopes.get(node)

    def indent_at(self, offset: int) -> str:
        """Return the white space at the beginning of the line of a byte offset."""
        before = self.line_before(offset)
        return before[: len(before) - len(before.lstrip())]

    def line_before(self, offset: int) -> str:
        """Return what stands before a byte offset in its line."""
        return self.data[self.line_start(offset) : offset].decode()

    def binders(self, name: str) -> Sequence[cst.CSTNode]:
        """Return the nodes that bind ``name``, in any scope."""
        return self._all_binders.get(name, ())

    @cached_property
    def _all_binders(self) -> dict[str, list[cst.CSTNode]]:
        matches: dict[str, list[cst.CSTNode]] = {}
        for scope in {scope for scope in self._scopes.values() if scope is not None}:
            for assignment in scope.assignments:
                if isinstance(assignment, metadata.Assignment):
                    matches.setdefault(assignment.name, []).append(assignment.node)
        return matches

    def imported_names(self) -> Iterator[str]:
        """Yield the full names in import statements as written; ``module.*`` for ``import *``."""
        for node in self.imports():
            yield from names_in_import(node)

    def used_names(self) -> list[str]:
        """Return the full names that the file imports, as written and as other files mean them, or spells."""
        written = list(self.imported_names())
        spelled = (name for node in self.nodes(cst.Attribute) for name in self.names(node))
        return list(dict.fromkeys([*map(self.follow, written), *written, *spelled]))

    def names_from(self) -> Iterator[tuple[cst.ImportFrom, cst.ImportAlias, str]]:
        """Yield each name of a from-import, with its statement and full name; ``import *`` has none."""
        for node in self.nodes(cst.ImportFrom):
            for alias, full in named_aliases(node):
                yield node, alias, full

    def references(self, name: str, binding: cst.CSTNode) -> list[cst.Name]:
        """Return the uses of ``name`` that ``binding``, an import statement or the target of an assignment,
        may have bound."""
        places = ((node, self.scope(node)) for node in self._names_by_value.get(name, ()))
        return [
            node
            for node, scope in places
            if node is not binding and scope is not None and binding in self._binding_nodes(scope, name)
        ]

    def _nodes_that_bind(self, scope: metadata.Scope, name: str) -> frozenset[cst.CSTNode]:
        found = self.bindings(scope, name)
        return frozenset(binding.node for binding in found if isinstance(binding, metadata.Assignment))

    # --- the meaning of names ---

    def _followed_names(self, node: cst.CSTNode) -> frozenset[str]:
        return frozenset(self.follow(name) for name in self.written_names(node))

    def written_names(self, node: cst.CSTNode) -> frozenset[str]:
        """Return ``names(node)``, but without resolving names in other files."""
        if not isinstance(node, (cst.Name, cst.Attribute)):
            return frozenset()
        return frozenset(self._names(node, MAX_ALIASES))

    @cached_property
    def star_modules(self) -> Sequence[str]:
        """The modules that this file imports with ``import *``."""
        stars = (node for node in self.nodes(cst.ImportFrom) if isinstance(node.names, cst.ImportStar))
        return [imported_module(node) for node in stars]

    def _names(self, node: cst.CSTNode, budget: int) -> set[str]:
        base, remaining = split_dotted(node)
        scope = self.scope(node) or (self.scope(base) if base is not None else None)
        if base is None or scope is None or self._is_no_reference(node):
            return set()
        return self._names_in(scope, base.value, remaining, budget)

    def _names_in_scope(self, scope: metadata.Scope, name: str, remaining: str, budget: int) -> set[str]:
        full: set[str] = set()
        for assignment in self.bindings(scope, name):
            full |= self._names_of(assignment, name, remaining, budget)
        return full or {name_in(star, name + remaining) for star in self.star_modules}

    def bindings(self, scope: metadata.Scope, name: str) -> frozenset[metadata.BaseAssignment]:
        """Return the assignments that bind ``name`` for the code in ``scope``."""
        return frozenset(scope[name]) if name in scope else frozenset()

    def _names_of(
        self, assignment: metadata.BaseAssignment, name: str, remaining: str, budget: int
    ) -> set[str]:
        if isinstance(assignment, metadata.ImportAssignment):
            return {
                qualified.name
                for qualified in assignment.get_qualified_names_for(name + remaining)
                if qualified.source is metadata.QualifiedNameSource.IMPORT
            }
        value = self.assigned_value(assignment)
        if budget and isinstance(value, (cst.Name, cst.Attribute)):
            return {full + remaining for full in self._names(value, budget - 1)}
        # Unknown code binds the name: mark it, so that a caller can tell if an import is the only origin.
        return {f"<local>.{name}{remaining}"}

    def assignments(self, name: cst.Name) -> list[metadata.Assignment]:
        """Return all assignments of a variable in the scope of ``name``, or in the one it is taken from."""
        scope = self.scope(name)
        bound = self.bindings(scope, name.value) if scope is not None else ()
        return [item for item in bound if isinstance(item, metadata.Assignment)]

    def assigned_value(self, assignment: metadata.BaseAssignment) -> cst.BaseExpression | None:
        """Return ``value`` of a plain ``name = value``; None for every other way to bind a name."""
        value, shared = self.value_and_sharing(assignment)
        return None if shared else value

    def value_and_sharing(self, assignment: metadata.BaseAssignment) -> tuple[cst.BaseExpression | None, str]:
        """Return the value of a name in ``a = value``, ``a = b = value`` or ``a, b = value, other``, and
        how the value is shared."""
        target = assignment.node if isinstance(assignment, metadata.Assignment) else None
        place = self.parent(target) if isinstance(target, cst.Name) else None
        if isinstance(place, cst.AnnAssign):
            return place.value if place.target is target else None, ""
        element = place if isinstance(place, cst.Element) else None
        unpacked = self.parent(element) if element is not None else None
        if isinstance(unpacked, (cst.Tuple, cst.List)):
            place = self.parent(unpacked)
        statement = self.parent(place) if isinstance(place, cst.AssignTarget) else None
        if not isinstance(statement, cst.Assign):
            return None, ""
        value = statement.value
        if element is not None and isinstance(unpacked, (cst.Tuple, cst.List)):
            values = value.elements if isinstance(value, (cst.Tuple, cst.List)) else ()
            if len(values) != len(unpacked.elements):
                return None, ""
            position = list(unpacked.elements).index(element)
            return values[position].value, "it is assigned together with another value"
        names = " and ".join(self.code(item.target) for item in statement.targets)
        return value, f"it is assigned to {names}" if len(statement.targets) > 1 else ""

    def _is_no_reference(self, node: cst.CSTNode) -> bool:
        """Return whether ``node`` is no reference: the ``b`` of ``a.b``, the ``k`` of ``f(k=1)``, or a name
        in an import statement."""
        parent = self._parents.get(node)
        if isinstance(parent, cst.Attribute) and parent.attr is node:
            return True
        if isinstance(parent, cst.Arg):
            return parent.keyword is node
        while isinstance(parent, cst.Attribute):
            parent = self._parents.get(parent)
        return isinstance(parent, (cst.ImportAlias, cst.ImportFrom, cst.AsName, cst.Param))


def _parents(module: cst.Module) -> dict[cst.CSTNode, cst.CSTNode]:
    """Return node -> parent for all nodes; LibCST's own provider takes several times as long, and its
    ``children`` copy the node."""
    parents: dict[cst.CSTNode, cst.CSTNode] = {}
    pending: list[cst.CSTNode] = [module]
    while pending:
        node = pending.pop()
        for name in _fields_of(type(node)):
            value = getattr(node, name)
            for child in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(child, cst.CSTNode):
                    parents[child] = node
                    pending.append(child)
    return parents


@cache
def _fields_of(kind: type[cst.CSTNode]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))
