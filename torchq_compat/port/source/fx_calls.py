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


def only_value(source: ParsedSource, name: cst.Name) -> tuple[Assignment, cst.BaseExpression] | None:
    """Return the value of a variable that is assigned once, and the assignment."""
    scope = source.scope(name)
    assignments = list(scope[name.value]) if scope is not None and name.value in scope else []
    if len(assignments) != 1 or not isinstance(assignments[0], Assignment):
        return None
    value = source.assigned_value(assignments[0])
    return (assignments[0], value) if value is not None else None


def possible_values(
    source: ParsedSource, name: cst.Name, seen: frozenset[str] = frozenset()
) -> Iterator[tuple[cst.BaseExpression, str]]:
    """Yield the possible values of a variable, with the reasons against editing each: another name has the
    value too, or the variable has other values. ``seen`` are the variables followed so far."""
    scope = source.scope(name)
    assignments = list(scope[name.value]) if scope is not None and name.value in scope else []
    several = f"{name.value} has several values" if len(assignments) > 1 else ""
    for assignment in assignments:
        if not isinstance(assignment, Assignment):
            continue
        value, shared = _value_and_names(source, assignment)
        if isinstance(value, cst.Name):
            if value.value not in seen:
                for result, _ in possible_values(source, value, seen | {name.value}):
                    yield result, f"{name.value} is another name of {value.value}"
        elif value is not None:
            yield value, shared or several


def _value_and_names(source: ParsedSource, assignment: Assignment) -> tuple[cst.BaseExpression | None, str]:
    """Return the value of the name in ``a = b = value`` or ``a, b = value, other``, and how the value is
    shared."""
    target = assignment.node
    parent = source.parent(target) if isinstance(target, cst.Name) else None
    element = parent if isinstance(parent, cst.Element) else None
    targets = source.parent(element) if element is not None else None
    if isinstance(targets, (cst.Tuple, cst.List)):
        parent = source.parent(targets)
    statement = source.parent(parent) if isinstance(parent, cst.AssignTarget) else None
    if not isinstance(statement, cst.Assign):
        return source.assigned_value(assignment), ""
    if element is not None and isinstance(targets, (cst.Tuple, cst.List)):
        values = statement.value.elements if isinstance(statement.value, (cst.Tuple, cst.List)) else ()
        if len(values) != len(targets.elements):
            return None, ""
        return values[
            list(targets.elements).index(element)
        ].value, "it is assigned together with another value"
    if len(statement.targets) > 1:
        names = " and ".join(source.code(item.target) for item in statement.targets)
        return statement.value, f"it is assigned to {names}"
    return statement.value, ""


def last_value(source: ParsedSource, name: cst.Name, before: cst.CSTNode) -> cst.BaseExpression | None:
    """Return the value of ``name`` at ``before``: that of the nearest assignment above it that surely ran;
    None if a branch or a loop may have assigned something else."""
    scope = source.scope(name)
    if scope is None or name.value not in scope:
        return None
    assignments = [a for a in scope[name.value] if isinstance(a, Assignment) and a.scope is scope]
    above = [a for a in assignments if _bound_at(source, a) <= source.start(before)]
    if not above or _in_loop(source, before, assignments):
        return None
    nearest = max(above, key=lambda a: source.start(a.node))
    surely_ran = next(_blocks(source, nearest.node), None) in list(_blocks(source, before))
    return source.assigned_value(nearest) if surely_ran else None


def sure_value(source: ParsedSource, name: cst.Name, before: cst.CSTNode) -> cst.BaseExpression | None:
    """Return the value of ``name`` at ``before``, or its only one; None if neither is known."""
    value, only = last_value(source, name, before), only_value(source, name)
    return only[1] if value is None and only is not None else value


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
