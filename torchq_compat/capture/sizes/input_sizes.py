"""The sizes a captured model may be called with: free, fixed, or related to each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.fx import Graph

from torchq_compat.capture.sizes.other_ranks import OtherRank
from torchq_compat.capture.sizes.shape_program import ShapeProgram
from torchq_compat.errors import InputError
from torchq_compat.support.argument_checks import shown

#: Sizes at which a rule about one of them is tried: small ones, and powers of two.
COMMON = (*range(1, 64), *(1 << power for power in range(6, 31)))
#: The label of an input, such as ``x`` or ``states[0]``, and a dimension; or an empty label and the number of
#: a size that a ``ShapeProgram`` computes.
Place = tuple[str, int]


@dataclass(frozen=True)
class Dimension:
    """One dimension of an input.

    Attributes:
        label: the label of the input, such as ``x`` or ``states[0]``.
        index: the index of the dimension.
        example: its size in the example inputs.
        root: the place of the dimension whose size it always has; None if it has a size of its own.
        is_fixed: whether the model accepts no other size than that of the example, or 1.
    """

    label: str
    index: int
    example: int
    root: Place | None = None
    is_fixed: bool = False

    @property
    def name(self) -> str:
        return f"{self.label}.size({self.index})"

    @property
    def place(self) -> Place:
        return self.label, self.index

    @property
    def is_free(self) -> bool:
        return self.root is None and not self.is_fixed


@dataclass(frozen=True)
class SizeRule:
    """A condition on the sizes of a call.

    Attributes:
        condition: Python code that computes whether the rule holds, from the names in ``places``.
        places: name in ``condition`` -> the size that it stands for.
        dimension: the dimension to name if the condition does not hold.
        expected: the required size, or the condition, as text for people.
        line: the line of the user's code that the rule comes from; None if it is unknown.
        by_python: whether Python decided something by the sizes, and not an operator that needs them.
        alone: of a rule about computed sizes, what it says of ``dimension`` where all others are as in the
            example; None if it is not known.
    """

    condition: str
    places: Mapping[str, Place]
    dimension: Dimension
    expected: str
    line: str | None = None
    by_python: bool = False
    alone: SizeRule | None = None

    @classmethod
    def fixing(
        cls, number: int, dimension: Dimension, line: str | None = None, *, by_python: bool = False
    ) -> SizeRule:
        """Return the rule that ``dimension``, the one of that ``number``, has its size in the example."""
        name, size = f"s{number}", str(dimension.example)
        return cls(f"{name} == {size}", {name: dimension.place}, dimension, size, line, by_python)

    def as_plain(self) -> SizeRule | None:
        """Return the rule, if it is about computed sizes as what it says of one dimension; None if that is
        not known. Compilers do not run the program that computes sizes."""
        return self.alone if self.is_computed else self

    @property
    def is_computed(self) -> bool:
        """Whether the rule is about sizes of tensors that the model computes."""
        return any(not label for label, _ in self.places.values())

    @cached_property
    def is_unbroken(self) -> bool:
        """Whether no size that was tried of one dimension breaks the rule."""
        if self.is_computed:
            return self.alone is None
        place, *others = self.places.values()
        return not others and all(self.holds({place: size}) for size in COMMON)

    @cached_property
    def _test(self) -> Callable[..., Any]:
        test: Callable[..., Any] = eval(f"lambda {', '.join(self.places)}: {self.condition}", {"math": math})
        return test

    def holds(self, sizes: Mapping[Place, Any]) -> bool:
        """Return whether the rule holds for ``sizes``; a rule about a size that is missing there holds, and
        none about one that is None."""
        if any(place not in sizes for place in self.places.values()):
            return True
        if any(sizes[place] is None for place in self.places.values()):
            return False
        try:
            return bool(self._test(*[sizes[place] for place in self.places.values()]))
        except (ArithmeticError, ValueError):
            return True  # A division by the size of an empty batch: the rule means nothing there.


@dataclass(frozen=True)
class InputSizes:
    """The sizes of the inputs of a captured model.

    Attributes:
        dimensions: the dimensions of every input tensor, in order.
        constants: label -> value of the inputs that are no tensors, which capture fixed.
        rules: the conditions on the sizes.
        program: computes the sizes that rules are about and inputs do not have.
        other_ranks: the calls of other ranks than the example's that are calls of its rank.
    """

    dimensions: tuple[Dimension, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)
    rules: tuple[SizeRule, ...] = ()
    program: ShapeProgram | None = None
    other_ranks: tuple[OtherRank, ...] = ()

    @property
    def free(self) -> tuple[Dimension, ...]:
        """The dimensions that have a size of their own."""
        return tuple(dimension for dimension in self.dimensions if dimension.is_free)

    def of_placeholders(self, graph: Graph) -> list[tuple[Dimension, ...]]:
        """Return the dimensions of each input of ``graph``, the captured graph or one made from it."""
        by_label: dict[str, list[Dimension]] = {}
        for dimension in self.dimensions:
            by_label.setdefault(dimension.label, []).append(dimension)
        waiting = iter(by_label.values())
        values = (node.meta.get("val") for node in graph.find_nodes(op="placeholder"))
        return [tuple(next(waiting, ())) if isinstance(v, Tensor) and v.dim() else () for v in values]

    @cached_property
    def ranks(self) -> dict[str, int]:
        """Label of an input that has dimensions -> their number."""
        ranks: dict[str, int] = {}
        for dimension in self.dimensions:
            ranks[dimension.label] = dimension.index + 1
        return ranks

    def other_rank(self, inputs: Mapping[str, Any]) -> tuple[OtherRank, tuple[int, ...]] | None:
        """Return what makes ``inputs``, by label, a call of the example's rank, and the sizes in place of the
        one dimension; None if they have that rank, or no other one that is known."""
        forms = ((form, form.sizes(inputs, self.ranks)) for form in self.other_ranks)
        return next(((form, sizes) for form, sizes in forms if sizes is not None), None)

    def broken_rule(self, sizes: Mapping[Place, Any]) -> SizeRule | None:
        """Return the first rule that ``sizes`` break; None if they break none."""
        known = dict(sizes)
        broken = _first_broken((rule for rule in self.rules if not rule.is_computed), known)
        if broken is not None or self.program is None:
            return broken
        if torch.compiler.is_dynamo_compiling():
            return _first_broken(self._plain_rules, known)
        return _first_broken(self.rules, self.with_computed(known))

    def with_computed(self, sizes: Mapping[Place, Any]) -> dict[Place, Any]:
        """Return ``sizes``, those of the inputs, and what is computed of them."""
        return dict(sizes) | ({} if self.program is None else self.program.sizes(sizes))

    @cached_property
    def _plain_rules(self) -> tuple[SizeRule, ...]:
        return tuple(plain for rule in self.rules if (plain := rule.as_plain()) is not None)

    def prepared_for_calls(self) -> InputSizes:
        """Return the sizes after computing what is kept: Dynamo enters no lock of a cached property."""
        _ = self.ranks, [rule._test for rule in (*self.rules, *self._plain_rules)]
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> InputSizes:
        """Return the sizes themselves, which nothing changes."""
        return self

    @cached_property
    def accepted(self) -> set[tuple[Any, ...]]:
        """The forms of tensors, shapes and dtypes, of calls that ``check`` accepts."""
        return set()

    def check(self, inputs: Mapping[str, Any]) -> None:
        """Raise if the captured model would compute a wrong result for ``inputs``, by label.

        Raises:
            InputError: a size, rank or constant does not fit the captured model, or a tensor has no sizes.
        """
        for label, value in inputs.items():
            if isinstance(value, Tensor) and value.is_nested:
                raise InputError.of("TQ901.nested", label=label)
        for label, rank in self.ranks.items():
            value = inputs.get(label)
            if isinstance(value, Tensor) and value.dim() != rank and self.rules:
                raise InputError.of("TQ901.rank", label=label, dimensions=value.dim(), rank=rank)
        for label, constant in self.constants.items():
            given = inputs.get(label, constant)
            if type(given) is not type(constant) or isinstance(constant, (int, float, str)):
                if isinstance(given, SymInt) or is_same_value(given, constant):
                    continue
                raise InputError.of("TQ901.fixed_value", label=label, given=shown(given), constant=constant)
        if not self.rules or any(not isinstance(inputs.get(label), Tensor) for label in self.ranks):
            return
        if (rule := self.broken_rule(sizes_of(inputs))) is not None:
            place = rule.dimension
            result = inputs[place.label].shape[place.index]
            raise _fixed_size(place.label, place.index, rule.expected, result, rule.line)


def sizes_of(inputs: Mapping[str, Any]) -> dict[Place, Any]:
    """Return the sizes of the tensors among ``inputs``, by label."""
    tensors = {label: value for label, value in inputs.items() if isinstance(value, Tensor)}
    return {(label, dim): size for label, value in tensors.items() for dim, size in enumerate(value.shape)}


def _first_broken(rules: Iterable[SizeRule], sizes: Mapping[Place, Any]) -> SizeRule | None:
    return next((rule for rule in rules if not rule.holds(sizes)), None)


def is_same_value(given: Any, fixed: Any) -> bool:
    """Return whether a call's value is the ``fixed`` one; one that cannot be compared with it, such as an
    array, is not."""
    try:
        return given is fixed or bool(given == fixed)
    except Exception:  # whatever the class of ``given`` raises
        return False


def _fixed_size(
    name: str, dimension: int, expected: str, value: object, line: str | None = None
) -> InputError:
    where = f", because of {line}" if line else ""
    needs = f"is fixed to {expected} there" if expected.isdigit() else f"needs {expected}"
    return InputError.of(
        "TQ901.fixed_size", name=name, value=value, dimension=dimension, needs=needs, where=where
    )


# Says which sizes of an input the rules about computed sizes accept, in numbers: "209 to 224".


#: Beyond this multiple of the example's size, a rule counts as one without a limit.
FARTHEST = 4
#: How many sizes next to the example's are tried one by one.
NEAR = 16
#: How many sizes are told one by one.
FEW = 3
#: What is told of a rule that no dimension breaks alone.
AS_IN_EXAMPLE = "a size at which the model decides as in the example"


def range_around(size: int, accepts: Callable[[int], bool], own: str) -> tuple[str, str]:
    """Return the sizes around ``size`` that ``accepts`` is true of, as text for people, and as Python code
    about ``own``."""
    if not any(accepts(other) for other in (size - 1, size + 1) if other):
        divisors = (step for step in range(2, size + 1) if size % step == 0)
        step = next((step for step in divisors if all(accepts(size + k * step) for k in (1, 2))), None)
        if step is None:
            return str(size), f"{own} == {size}"
        return f"a multiple of {step}", f"{own} % {step} == 0"
    low, high = (_last_accepted(size, end, accepts) for end in (0, FARTHEST * size + 1))
    if high == FARTHEST * size:
        below = [other for other in range(1, min(low, NEAR)) if accepts(other)]
        if 0 < len(below) <= FEW:
            return f"{', '.join(map(str, below))} or at least {low}", f"{own} in {below} or {own} >= {low}"
        return f"at least {low}", f"{own} >= {low}"
    period = next((item for item in range(high - low + 2, high + 1) if _repeats(low, high, item, accepts)), 0)
    if period:
        condition = f"({own} + {-low % period}) % {period} <= {high - low}"
        return f"{low} to {high}, {low + period} to {high + period} and so on", condition
    return f"{low} to {high}", f"{low} <= {own} <= {high}"


def _repeats(low: int, high: int, period: int, accepts: Callable[[int], bool]) -> bool:
    """Return whether sizes are accepted as those from ``low`` to ``high`` are, as where a model pads to a
    multiple of a window."""
    blocks = [(low + step, high + step) for step in (-period, period, 2 * period) if low + step > 0]
    return (period <= NEAR or high % period == 0) and all(
        accepts(first) and accepts(last) and not accepts(first - 1) and not accepts(last + 1)
        for first, last in blocks
    )


def _last_accepted(good: int, bad: int, accepts: Callable[[int], bool]) -> int:
    """Return the last size from ``good`` to ``bad`` that is accepted: one by one at first, as what repeats
    does so soon, then by bisection."""
    step = 1 if bad > good else -1
    for _ in range(NEAR):
        if good + step == bad or not accepts(good + step):
            return good
        good += step
    while abs(good - bad) > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if accepts(middle) else (good, middle)
    return good


def accepted_range(sizes: InputSizes, example: Mapping[Place, int]) -> InputSizes:
    """Return ``sizes`` with each rule about computed sizes told of the dimension that may break it; rules
    that no size breaks, or none any more, are dropped."""
    if sizes.program is None:
        return sizes
    tries = _Tries(sizes, dict(example), sizes.with_computed(example))
    by_condition: dict[str, SizeRule] = {}
    for dimension in (item for item in sizes.dimensions if item.root is None):
        broken = tries.broken_by(dimension)
        if not broken:
            continue
        own = f"s{sizes.dimensions.index(dimension)}"
        words, alone = range_around(dimension.example, partial(tries.is_accepted, dimension), own)
        for rule in broken:
            of_one = replace(rule, dimension=dimension, expected=words)
            plain = replace(of_one, condition=alone, places={own: dimension.place})
            by_condition.setdefault(rule.condition, replace(of_one, alone=plain))
    # What a line of the model fixes is told with that line, not once more as an operator's rule.
    fixed = {
        rule.dimension.place for rule in by_condition.values() if rule.expected == str(rule.dimension.example)
    }
    rules = tuple(
        by_condition.get(
            rule.condition, replace(rule, expected=AS_IN_EXAMPLE, dimension=mover or rule.dimension)
        )
        if rule.is_computed
        else rule
        for rule in sizes.rules
        for mover in [tries.mover(rule)]
        if rule.condition in by_condition
        or (
            mover and rule.is_unbroken if rule.is_computed else rule.line or rule.dimension.place not in fixed
        )
    )
    needs_program = any(rule.is_computed for rule in rules)
    return replace(sizes, rules=rules, program=sizes.program if needs_program else None)


@dataclass
class _Tries:
    """Which sizes of one dimension, all others as in the example, break which rules."""

    sizes: InputSizes
    example: dict[Place, int]
    known: Mapping[Place, Any]
    _refused: set[tuple[Place, int]] = field(default_factory=set)
    _movers: dict[Place, Dimension] = field(default_factory=dict)

    def broken_by(self, dimension: Dimension) -> list[SizeRule]:
        size = dimension.example
        near = {1, size + 1, size + 2, 2 * size, FARTHEST * size, -(-size // 2), size - 1} - {0, -1, size}
        matches: dict[str, SizeRule] = {}
        for other in sorted(near):
            for rule in self._broken_at(dimension, other):
                matches[rule.condition] = rule
        return list(matches.values())

    def mover(self, rule: SizeRule) -> Dimension | None:
        """Return the dimension that changed a size which ``rule`` is about in some try; None if none did."""
        return next((self._movers[place] for place in rule.places.values() if place in self._movers), None)

    def is_accepted(self, dimension: Dimension, size: int) -> bool:
        return not self._broken_at(dimension, size) and (dimension.place, size) not in self._refused

    def _broken_at(self, dimension: Dimension, size: int) -> list[SizeRule]:
        changed = {
            item.place: size for item in self.sizes.dimensions if dimension.place in (item.place, item.root)
        }
        known = self.sizes.with_computed({**self.example, **changed})
        for place, value in known.items():
            if self.known[place] != value:
                self._movers.setdefault(place, dimension)
        if len(known) < len(self.known):  # An operator refuses.
            self._refused.add((dimension.place, size))
        return [rule for rule in self.sizes.rules if rule.is_computed and not rule.holds(known)]
