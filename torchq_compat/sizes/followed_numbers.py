"""Numbers that know which sizes they were computed from.

While a model is captured, a size that its Python reads is a ``torch.SymInt`` around a ``Followed``: it has
the value of the example, and the expression of sizes that it was computed by. Arithmetic makes others. Where
Python asks for the value itself, for a branch, a loop or an index, that is recorded as a guard: from there on
the graph is right only at sizes for which the expression has that value.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import SymBool, SymFloat, SymInt
from torch.fx import Node

__all__ = [
    "Computed",
    "Followed",
    "FollowedInt",
    "Operation",
    "Size",
    "condition_of",
    "followed",
    "in_terms_of",
    "is_followed",
    "plain",
    "sizes_in",
]

NUMBERS = (SymInt, SymFloat, SymBool)


@dataclass(frozen=True)
class Operation:
    """A function of numbers.

    Attributes:
        function: the function, which takes plain numbers and runs in a graph.
        words: its call as Python code, with ``{}`` for each operand.
    """

    function: Callable[..., Any]
    words: str


#: The methods that torch calls on the node of a number -> what they compute.
OPERATIONS = {
    "add": Operation(operator.add, "({} + {})"),
    "sub": Operation(operator.sub, "({} - {})"),
    "mul": Operation(operator.mul, "({} * {})"),
    **{name: Operation(operator.floordiv, "({} // {})") for name in ("floordiv", "int_floordiv")},
    **{
        name: Operation(operator.truediv, "({} / {})") for name in ("truediv", "int_truediv", "float_truediv")
    },
    **{name: Operation(operator.pow, "({} ** {})") for name in ("pow", "pow_by_natural", "float_pow")},
    "mod": Operation(operator.mod, "({} % {})"),
    "neg": Operation(operator.neg, "(-{})"),
    "pos": Operation(operator.pos, "{}"),
    "lshift": Operation(operator.lshift, "({} << {})"),
    "rshift": Operation(operator.rshift, "({} >> {})"),
    "and_": Operation(operator.and_, "({} & {})"),
    "or_": Operation(operator.or_, "({} | {})"),
    "bitwise_and": Operation(operator.and_, "({} & {})"),
    "bitwise_or": Operation(operator.or_, "({} | {})"),
    "bitwise_xor": Operation(operator.xor, "({} ^ {})"),
    "eq": Operation(operator.eq, "({} == {})"),
    "ne": Operation(operator.ne, "({} != {})"),
    "lt": Operation(operator.lt, "({} < {})"),
    "le": Operation(operator.le, "({} <= {})"),
    "gt": Operation(operator.gt, "({} > {})"),
    "ge": Operation(operator.ge, "({} >= {})"),
    "sym_not": Operation(operator.not_, "(not {})"),
    "sym_min": Operation(torch.sym_min, "min({}, {})"),
    "sym_max": Operation(torch.sym_max, "max({}, {})"),
    "ceil": Operation(math.ceil, "math.ceil({})"),
    "floor": Operation(math.floor, "math.floor({})"),
    "trunc": Operation(math.trunc, "math.trunc({})"),
    "round": Operation(round, "round({}, {})"),
    "abs": Operation(abs, "abs({})"),
    "sym_float": Operation(torch.sym_float, "float({})"),
    "sym_ite": Operation(torch.sym_ite, "({1} if {0} else {2})"),
    "sqrt": Operation(torch._sym_sqrt, "math.sqrt({})"),  # type: ignore[attr-defined]
}


@dataclass(frozen=True)
class Size:
    """The size of dimension ``dim`` of the tensor that ``node`` of a graph computes; None if no node does."""

    node: Any
    dim: int


@dataclass(frozen=True)
class Computed:
    """A number computed from others, each a ``Size``, a ``Computed`` or a plain number."""

    operation: Operation
    operands: tuple[Any, ...]


def sizes_in(expression: Any) -> Iterator[Size]:
    """Yield the sizes that ``expression`` is computed from."""
    if isinstance(expression, Size):
        yield expression
    elif isinstance(expression, Computed):
        for operand in expression.operands:
            yield from sizes_in(operand)


def in_terms_of(expression: Any, nodes: Mapping[Any, Any]) -> Any:
    """Return ``expression`` with the sizes of other ``nodes``."""
    if isinstance(expression, Size):
        return Size(nodes[expression.node], expression.dim)
    if isinstance(expression, Computed):
        return Computed(expression.operation, tuple(in_terms_of(each, nodes) for each in expression.operands))
    return expression


def as_code(expression: Any, names: Mapping[Size, str]) -> str:
    """Return ``expression`` as Python code in which each size is called as in ``names``."""
    if isinstance(expression, Size):
        return names[expression]
    if not isinstance(expression, Computed):
        return repr(expression)
    return expression.operation.words.format(*(as_code(operand, names) for operand in expression.operands))


#: What is true if the comparison is false.
OPPOSITES = {"eq": "ne", "ne": "eq", "lt": "ge", "ge": "lt", "gt": "le", "le": "gt"}


def condition_of(expression: Any, value: Any, names: Mapping[Size, str]) -> str:
    """Return Python code that is true where ``expression`` has ``value``."""
    code = as_code(expression, names)
    if not isinstance(value, bool):
        return f"{code} == {value!r}"
    if not value and isinstance(expression, Computed):
        other = next(
            (o for o, each in OPERATIONS.items() if each == expression.operation and o in OPPOSITES), None
        )
        if other is None:
            return f"not {code}"
        code = as_code(Computed(OPERATIONS[OPPOSITES[other]], expression.operands), names)
    is_comparison = isinstance(expression, Computed) and expression.operation.words.startswith("({} ")
    return code[1:-1] if is_comparison else code


class Followed:
    """The node of a ``torch.SymInt``, ``SymFloat`` or ``SymBool``; see the module.

    The names of its methods are those that torch calls.
    """

    constant: ClassVar[None] = None
    _hint = property(lambda self: self.value)
    hint = property(lambda self: self.value)

    def __init__(self, guards: Guards, value: Any, expression: Any) -> None:
        self.guards, self.value, self.expression = guards, value, expression

    def guard(self, *_: Any) -> Any:
        """Return the value, which Python asks for."""
        self.guards(self.expression, self.value)
        return self.value

    guard_int = guard_bool = guard_float = guard_size_oblivious = guard_or_false = guard_or_true = guard
    expect_true = bool_ = int_ = float_ = statically_known_true = guard

    def require_hint(self, *_: Any) -> Any:
        return self.value

    def expect_size(self, *_: Any) -> bool:
        return True

    def clone(self) -> Followed:
        return self

    def is_int(self) -> bool:
        return type(self.value) is int

    def is_float(self) -> bool:
        return type(self.value) is float

    def is_bool(self) -> bool:
        return type(self.value) is bool

    def is_nested_int(self) -> bool:
        return False

    is_constant = is_nested_int

    def is_symbolic(self) -> bool:
        return True

    has_hint = is_symbolic

    def maybe_as_int(self) -> None:
        return None

    maybe_as_float = maybe_as_bool = maybe_as_int

    def wrap_int(self, value: Any) -> Followed:
        return Followed(self.guards, value, value)

    wrap_float = wrap_bool = wrap_int

    def __str__(self) -> str:
        return f"{self.value}~"

    _graph_repr = __str__

    def __getattr__(self, name: str) -> Any:
        if name == "str":
            return self.__str__
        operation = OPERATIONS.get(name)
        if operation is None:
            raise AttributeError(name)

        def compute(*others: Any) -> Any:
            values = [_value(other) for other in others]
            expressions = [_expression(other) for other in others]
            made = Computed(operation, (self.expression, *expressions))
            return Followed(self.guards, operation.function(self.value, *values), made)

        return compute


#: Is told each expression, with its value, that Python asks for.
Guards = Callable[[Any, Any], None]


def _value(operand: Any) -> Any:
    return operand.value if isinstance(operand, Followed) else operand


def _expression(operand: Any) -> Any:
    return operand.expression if isinstance(operand, Followed) else operand


class FollowedInt(SymInt):
    """A size as it is read. Unlike other numbers of torch it can be a key of a dict."""

    def __init__(self, node: Followed) -> None:
        super().__init__(node)  # type: ignore[no-untyped-call]

    def __hash__(self) -> int:
        return hash(int(self))


def followed(guards: Guards, value: int, node: Node, dim: int) -> SymInt:
    """Return the size ``value`` of dimension ``dim`` of the tensor that ``node`` computes."""
    return FollowedInt(Followed(guards, value, Size(node, dim)))


def is_followed(value: Any) -> bool:
    """Return whether ``value`` is a number that knows its sizes, not one of torch's own symbols."""
    return isinstance(value, NUMBERS) and isinstance(value.node, Followed)


def plain(leaf: Any) -> Any:
    """Return the plain number of a followed one, and anything else as it is."""
    return leaf.node.value if is_followed(leaf) else leaf
