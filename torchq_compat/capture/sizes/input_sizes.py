"""The sizes a captured model may be called with: free, fixed, or related to each other."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import SymInt, Tensor
from torch.fx import GraphModule

from torchq_compat.capture.sizes.size_guards import Guard
from torchq_compat.errors import InputError
from torchq_compat.support.argument_checks import shown
from torchq_compat.support.upstream import PythonPrinter

__all__ = ["Dimension", "InputSizes", "SizeRule", "is_same_value"]

#: The most forms of calls that are remembered.
MOST_ACCEPTED = 512
#: The sizes on which a rule has to hold to count as one that excludes only 1.
TRIED = range(2, 66)
NAMESPACE: dict[str, Any] = {"math": math, "torch": torch, "sympy": sympy}


@dataclass(frozen=True)
class Dimension:
    """One dimension of an input.

    Attributes:
        label: the label of the input, such as ``x`` or ``states[0]``.
        index: the index of the dimension.
        example: its size in the example inputs.
        symbol: torch.export's first symbol of the size, before it found relations to other sizes.
        expression: the size in the captured graph, an expression of symbols or a number.
    """

    label: str
    index: int
    example: int
    symbol: Any
    expression: Any

    @property
    def name(self) -> str:
        return f"{self.label}.size({self.index})"

    @property
    def is_fixed(self) -> bool:
        return not self.expression.free_symbols


@dataclass(frozen=True)
class SizeRule:
    """A condition on the sizes of a call.

    Attributes:
        condition: a boolean expression of the symbols.
        dimension: the dimension to name if the condition does not hold.
        expected: the required size, or the condition, as text for people.
        line: the line of the user's code that the rule comes from; None if it is unknown.
        by_python: see ``Guard``.
        is_soft: whether the rule is a guard of an operator, which may require more than the kernel needs.
    """

    condition: Any
    dimension: Dimension
    expected: str
    line: str | None = None
    by_python: bool = False
    is_soft: bool = False

    @property
    def excludes_one(self) -> bool:
        """Whether the rule allows every size but 1. Checks of memory layouts cause such rules, and a result
        seldom depends on them."""
        if isinstance(self.condition, sympy.Ne) and 1 in self.condition.args:
            return True
        if self.by_python or len(self.names) != 1:
            return False
        [name] = self.names
        return not self.holds({name: 1}) and all(self.holds({name: size}) for size in TRIED)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(str(symbol) for symbol in self.condition.free_symbols))

    @cached_property
    def _test(self) -> Callable[..., Any]:
        code = PythonPrinter().doprint(self.condition)
        test: Callable[..., Any] = eval(f"lambda {', '.join(self.names)}: {code}", NAMESPACE)
        return test

    def holds(self, sizes: Mapping[str, Any]) -> bool:
        """Return whether the rule holds for ``sizes``, by symbol; a rule about an unknown size holds."""
        if any(name not in sizes for name in self.names):
            return True
        try:
            return bool(self._test(*[sizes[name] for name in self.names]))
        except ZeroDivisionError:
            return True  # A division by the size of an empty batch: the rule means nothing there.


@dataclass(frozen=True)
class InputSizes:
    """The sizes of the inputs of a captured model.

    Attributes:
        dimensions: the dimensions of every input tensor, in order.
        constants: label -> value of the inputs that are no tensors, which capture fixed.
        rules: the conditions on the sizes.
    """

    dimensions: tuple[Dimension, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)
    rules: tuple[SizeRule, ...] = ()

    @classmethod
    def of(cls, graph_module: GraphModule, inputs: Mapping[str, Any], guards: Iterable[Guard]) -> InputSizes:
        """Return the sizes of the placeholders of ``graph_module``, which was captured with ``inputs``, the
        inputs by label, under ``guards``."""
        placeholders = graph_module.graph.find_nodes(op="placeholder")
        dimensions: list[Dimension] = []
        constants: dict[str, Any] = {}
        for node, (label, example) in zip(placeholders, inputs.items(), strict=True):
            value = node.meta.get("val")
            if isinstance(example, Tensor) and isinstance(value, Tensor):
                pairs = enumerate(zip(value.shape, example.shape, strict=True))
                dimensions.extend(_dimension(label, i, size, known) for i, (size, known) in pairs)
            elif not isinstance(example, Tensor):
                constants[label] = example
        return cls(tuple(dimensions), constants, tuple(_rules(dimensions, tuple(guards))))

    @property
    def symbols(self) -> dict[str, Dimension]:
        """The first dimension whose size is each free symbol, by the name of the symbol."""
        found: dict[str, Dimension] = {}
        for dimension in self.dimensions:
            if dimension.expression.is_Symbol:
                found.setdefault(str(dimension.expression), dimension)
        return found

    def sizes(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the value of each symbol in a call with ``inputs``."""
        sizes: dict[str, Any] = {}
        for name, dimension in self._places:
            shape = inputs[dimension.label].shape
            if dimension.index < len(shape):
                sizes[name] = shape[dimension.index]
        return sizes

    @cached_property
    def _places(self) -> tuple[tuple[str, Dimension], ...]:
        own = ((str(dimension.symbol), dimension) for dimension in self.dimensions)
        return (*own, *self.symbols.items())

    @cached_property
    def _ranks(self) -> dict[str, int]:
        ranks: dict[str, int] = {}
        for dimension in self.dimensions:
            ranks[dimension.label] = dimension.index + 1
        return ranks

    def with_rules(self, rules: Sequence[SizeRule]) -> InputSizes:
        return replace(self, rules=(*self.rules, *rules))

    def with_line(self, places: Iterable[tuple[str, int]], line: str) -> InputSizes:
        """Return the sizes with ``line`` in the rules about the dimensions at ``places`` that lack one."""
        known = set(places)
        rules = (
            replace(rule, line=line)
            if rule.line is None and (rule.dimension.label, rule.dimension.index) in known
            else rule
            for rule in self.rules
        )
        return replace(self, rules=tuple(rules))

    def broken_rule(self, sizes: Mapping[str, Any]) -> SizeRule | None:
        """Return the first rule that ``sizes`` break; None if they break none."""
        return next((rule for rule in self.rules if not rule.holds(sizes)), None)

    @cached_property
    def _accepted(self) -> set[tuple[Any, ...]]:
        return set()

    def were_accepted(self, forms: tuple[Any, ...]) -> bool:
        """Return whether a call with tensors of these ``forms``, shapes and dtypes, was checked before."""
        return forms in self._accepted

    def accept(self, forms: tuple[Any, ...]) -> None:
        """Remember that ``check`` accepts calls with tensors of these ``forms``."""
        if len(self._accepted) >= MOST_ACCEPTED:
            self._accepted.clear()
        self._accepted.add(forms)

    def check(self, inputs: Mapping[str, Any]) -> None:
        """Raise if the captured model would compute a wrong result for ``inputs``, by label.

        Raises:
            InputError: a size, rank or constant does not fit the captured model, or a tensor has no sizes.
        """
        for label, value in inputs.items():
            if isinstance(value, Tensor) and value.is_nested:
                raise InputError(
                    f"argument {label!r} is a nested tensor, whose rows have no common size.",
                    hint="pass a dense tensor: torch.nested.to_padded_tensor makes one.",
                )
        for label, rank in self._ranks.items():
            value = inputs.get(label)
            if isinstance(value, Tensor) and value.dim() != rank and self.rules:
                raise InputError(
                    f"argument {label!r} has {value.dim()} dimensions, and {rank} in the example it was "
                    "captured with.",
                    hint="capture the model with an example of that rank.",
                )
        for label, constant in self.constants.items():
            given = inputs.get(label, constant)
            if type(given) is not type(constant) or isinstance(constant, (int, float, str)):
                if isinstance(given, SymInt) or is_same_value(given, constant):
                    continue
                raise InputError(
                    f"argument {label!r} is {shown(given)}, but the captured model is fixed to {constant!r}, "
                    "its value in example_inputs.",
                    hint="capture the model once for each value; only tensors stay free.",
                )
        if not self.rules or any(not isinstance(inputs.get(label), Tensor) for label in self._ranks):
            return
        sizes = self.sizes(inputs)
        rule = self.broken_rule(sizes)
        if rule is not None:
            place = rule.dimension
            found = inputs[place.label].shape[place.index]
            raise _fixed_size(place.label, place.index, rule.expected, found, rule.line)


def is_same_value(given: Any, fixed: Any) -> bool:
    """Return whether a call's value is the ``fixed`` one; one that cannot be compared with it, such as an
    array, is not."""
    try:
        return given is fixed or bool(given == fixed)
    except Exception:  # whatever the class of ``given`` raises
        return False


def _dimension(label: str, index: int, size: Any, example: int) -> Dimension:
    # node._expr is the symbol of the size before torch.export replaced it by an expression of others.
    symbol = size.node._expr if isinstance(size, SymInt) else None
    if symbol is None or not symbol.is_Symbol:
        symbol = sympy.Symbol(f"{re.sub('[^0-9A-Za-z]', '_', label)}_{index}", integer=True)
    expression = size.node.expr if isinstance(size, SymInt) else sympy.Integer(int(size))
    return Dimension(label, index, int(example), symbol, expression)


def _rules(dimensions: list[Dimension], guards: tuple[Guard, ...]) -> Iterable[SizeRule]:
    yield from _rules_of_dimensions(dimensions, guards)
    replaced = {d.symbol: d.expression for d in dimensions}
    known = {symbol for d in dimensions for symbol in d.expression.free_symbols}
    for guard in guards:
        condition = guard.condition.xreplace(replaced)
        if condition in (sympy.true, True) or not condition.free_symbols or condition.free_symbols - known:
            continue
        place = next(d for d in dimensions if d.expression.free_symbols & condition.free_symbols)
        labels = {d.label for d in dimensions if d.expression.free_symbols & condition.free_symbols}
        # A rule that relates two inputs is never soft: one trial is too little evidence to drop it.
        words, soft = _words(condition, dimensions), not guard.by_python and len(labels) == 1
        if guard.by_module and isinstance(condition, sympy.Eq):
            # torch's kernels check less than a custom module does: they accept packed sequences of one length
            # with any width.
            soft = False
        yield SizeRule(condition, place, words, guard.line, guard.by_python, is_soft=soft)


def _rules_of_dimensions(dimensions: list[Dimension], guards: tuple[Guard, ...]) -> Iterable[SizeRule]:
    """Yield the rules that follow from the expression of each dimension: that its size is a fixed number, or
    computed from the size of another dimension."""
    first: dict[Any, Dimension] = {}
    for dimension in dimensions:
        symbol, expression = dimension.symbol, dimension.expression
        if expression.is_Symbol and expression not in first:
            first[expression] = dimension
            continue
        words = _words(expression, dimensions)
        guard = next((g for g in guards if dimension.symbol in g.condition.free_symbols), None)
        yield SizeRule(
            sympy.Eq(symbol, expression, evaluate=False),
            dimension,
            words if dimension.is_fixed else f"{dimension.name} == {words}",
            guard.line if guard else None,
            guard.by_python if guard else False,
        )


def _words(expression: Any, dimensions: list[Dimension]) -> str:
    """Return ``expression`` as text, with sizes such as ``x.size(0)`` in place of its symbols."""
    names = {d.expression: d.name for d in reversed(dimensions) if d.expression.is_Symbol}
    named = expression.xreplace({symbol: sympy.Symbol(name) for symbol, name in names.items()})
    return str(PythonPrinter().doprint(named))


def _fixed_size(
    name: str, dimension: int, expected: str, found: object, line: str | None = None
) -> InputError:
    where = f", because of {line}" if line else ""
    needs = f"is fixed to {expected} there" if expected.isdigit() else f"needs {expected}"
    return InputError(
        f"argument {name!r} has size {found} in dimension {dimension}, "
        f"but the captured model {needs}{where}.",
        hint="the model's own code depends on that size; capture it with the size you need, "
        "or pass dynamic_shapes= to prepare_fx.",
    )
