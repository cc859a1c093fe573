"""Calls of the FX functions, under their legacy or new names, and the origins of their arguments."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import libcst as cst
from libcst.metadata import Assignment

from torchq_compat.port.names import LEGACY_MODULES, LEGACY_NAMES, MOVED, PARAMETERS, PT2E_FUNCTIONS
from torchq_compat.port.source.parsed import ParsedSource
from torchq_compat.read.old_forms import KEYWORDS

FUNCTIONS = frozenset(PARAMETERS)
#: Full name, legacy or new -> legacy function; ``torchq_compat`` itself exports those of ``quantize_fx``.
CANONICAL = {
    f"{module}.{name}": new_name
    for moved in MOVED
    for name, new_name in moved.names.items()
    for module in (moved.legacy, moved.replacement, "torchq_compat")
    if new_name in FUNCTIONS
}
FX_MODULES = LEGACY_MODULES | {moved.replacement for moved in MOVED}


@dataclass(frozen=True)
class FxCall:
    """One call; ``function`` is its legacy name, even if the code uses another."""

    node: cst.Call
    function: str

    @property
    def has_stars(self) -> bool:
        return any(arg.star for arg in self.node.args)

    def arg(self, parameter: str) -> cst.Arg | None:
        """Return the argument for a parameter, given by position, by keyword or by the keyword's old name."""
        position = PARAMETERS[self.function].index(parameter) if parameter in self.parameters else None
        for index, arg in enumerate(self.node.args):
            if arg.star:
                return None
            if arg.keyword is None and index == position:
                return arg
            if arg.keyword is not None and parameter in (arg.keyword.value, KEYWORDS.get(arg.keyword.value)):
                return arg
        return None

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(PARAMETERS[self.function])


def uses_fx(source: ParsedSource) -> bool:
    """Return whether the text uses FX graph mode at all, before or after rewriting."""
    known = FX_MODULES | LEGACY_NAMES | set(CANONICAL)
    return not known.isdisjoint(source.used_names()) or not FX_MODULES.isdisjoint(
        source.follow(name).rpartition(".")[0] for name in source.imported_names()
    )


def uses_pt2e(source: ParsedSource) -> bool:
    return any(name.rpartition(".")[2] in PT2E_FUNCTIONS for name in source.used_names())


def fx_call(source: ParsedSource, node: cst.CSTNode | None) -> FxCall | None:
    """Return ``node`` as a call of an FX function, if it is one and may be nothing else."""
    if not isinstance(node, cst.Call):
        return None
    functions = {CANONICAL.get(name, "") for name in source.names(node.func)}
    function = functions.pop() if len(functions) == 1 else ""
    return FxCall(node, function) if function else None


@lru_cache(maxsize=1)
def fx_calls(source: ParsedSource) -> tuple[FxCall, ...]:
    """Return all calls of FX functions, in text order."""
    calls = (fx_call(source, node) for node in source.nodes(cst.Call))
    return tuple(call for call in calls if call is not None)


def only_value(source: ParsedSource, name: cst.Name) -> cst.BaseExpression | None:
    """Return the value of a variable that is assigned once; None of others."""
    assignments = source.assignments(name)
    return source.assigned_value(assignments[0]) if len(assignments) == 1 else None


def possible_values(
    source: ParsedSource, name: cst.Name, seen: frozenset[str] = frozenset()
) -> Iterator[tuple[Assignment, cst.BaseExpression, str]]:
    """Yield the assignments of a variable with their values, and the reasons against editing each: another
    name has the value too, or the variable has other values. ``seen`` are the variables followed so far."""
    assignments = source.assignments(name)
    several = f"{name.value} has several values" if len(assignments) > 1 else ""
    for assignment in assignments:
        value, shared = source.value_and_sharing(assignment)
        if isinstance(value, cst.Name):
            if value.value not in seen:
                for item, result, _ in possible_values(source, value, seen | {name.value}):
                    yield item, result, f"{name.value} is another name of {value.value}"
        elif value is not None:
            yield assignment, value, shared or several


def last_value(source: ParsedSource, name: cst.Name, before: cst.CSTNode) -> cst.BaseExpression | None:
    """Return the value of ``name`` at ``before``: that of the nearest assignment above it that surely ran;
    None if a branch or a loop may have assigned something else."""
    assignments = [a for a in source.assignments(name) if a.scope is source.scope(name)]
    above = [a for a in assignments if _bound_at(source, a) <= source.start(before)]
    if not above or _in_loop(source, before, assignments):
        return None
    nearest = max(above, key=lambda a: source.start(a.node))
    surely_ran = next(_blocks(source, nearest.node), None) in list(_blocks(source, before))
    return source.assigned_value(nearest) if surely_ran else None


def sure_value(source: ParsedSource, name: cst.Name, before: cst.CSTNode) -> cst.BaseExpression | None:
    """Return the value of ``name`` at ``before``, or its only one; None if neither is known."""
    value = last_value(source, name, before)
    return value if value is not None else only_value(source, name)


def _bound_at(source: ParsedSource, assignment: Assignment) -> int:
    """Return the offset from which the name has its new value: in ``x = f(x)`` the call uses the old one."""
    value = source.assigned_value(assignment)
    return source.end(value) if value is not None else source.start(assignment.node)


def _blocks(source: ParsedSource, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    return (a for a in source.ancestors(node) if isinstance(a, (cst.IndentedBlock, cst.Module)))


def _in_loop(source: ParsedSource, node: cst.CSTNode, assignments: list[Assignment]) -> bool:
    """Return whether a later assignment in a loop around ``node`` runs before ``node`` the next time."""
    for loop in source.ancestors(node):
        if isinstance(loop, (cst.FunctionDef, cst.ClassDef)):
            break
        if isinstance(loop, (cst.For, cst.While)) and any(
            source.start(node) < source.start(a.node) < source.end(loop) for a in assignments
        ):
            return True
    return False
