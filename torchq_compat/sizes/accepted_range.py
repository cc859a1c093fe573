"""Says which sizes of an input the rules about computed sizes accept, in numbers: "209 to 224"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchq_compat.sizes.input_sizes import Dimension, InputSizes, Place, SizeRule

__all__ = ["accepted_range"]

#: Beyond this multiple of the example's size, a rule counts as one without a limit.
FARTHEST = 4
#: How many sizes next to the example's are tried one by one.
NEAR = 16
#: What is told of a rule that no dimension breaks alone.
AS_IN_EXAMPLE = "sizes at which the model decides as in the example"


def accepted_range(sizes: InputSizes, example: Mapping[Place, int]) -> InputSizes:
    """Return ``sizes`` with each rule about computed sizes told of the dimension that may break it; rules
    that no size breaks are dropped."""
    tries = _Tries(sizes, dict(example))
    told: dict[str, SizeRule] = {}
    for dimension in (each for each in sizes.dimensions if each.root is None):
        broken = tries.broken_by(dimension)
        if not broken:
            continue
        own = f"s{sizes.dimensions.index(dimension)}"
        words, alone = tries.words(dimension, own)
        for rule in broken:
            of_one = replace(rule, dimension=dimension, expected=words)
            plain = replace(of_one, condition=alone, places={own: dimension.place})
            told.setdefault(rule.condition, replace(of_one, alone=plain))
    # What a line of the model fixes is told with that line, not once more as an operator's rule.
    fixed = {rule.dimension.place for rule in told.values() if rule.expected == str(rule.dimension.example)}
    rules = tuple(
        told.get(rule.condition, replace(rule, expected=AS_IN_EXAMPLE)) if rule.is_computed else rule
        for rule in sizes.rules
        if rule.condition in told
        or (tries.may_break(rule) if rule.is_computed else rule.line or rule.dimension.place not in fixed)
    )
    needs_program = any(rule.is_computed for rule in rules)
    return replace(sizes, rules=rules, program=sizes.program if needs_program else None)


@dataclass
class _Tries:
    """Which sizes of one dimension, all others as in the example, break which rules."""

    sizes: InputSizes
    example: dict[Place, int]
    _shapes: dict[Any, Any] = field(default_factory=dict)
    _refused: set[tuple[Place, int]] = field(default_factory=set)
    _values: dict[Place, set[int]] = field(default_factory=dict)
    _known: dict[tuple[Place, int], tuple[SizeRule, ...]] = field(default_factory=dict)

    def broken_by(self, dimension: Dimension) -> list[SizeRule]:
        size = dimension.example
        near = {1, size + 1, size + 2, 2 * size, FARTHEST * size, -(-size // 2), size - 1} - {0, -1, size}
        found: dict[str, SizeRule] = {}
        for other in sorted(near):
            for rule in self._broken_at(dimension, other):
                found[rule.condition] = rule
        return list(found.values())

    def may_break(self, rule: SizeRule) -> bool:
        """Return whether a size that ``rule`` is about was another one in some try."""
        return any(len(self._values.get(place, ())) > 1 for place in rule.places.values())

    def words(self, dimension: Dimension, own: str) -> tuple[str, str]:
        """Return the sizes of ``dimension`` around the example's that break no rule, as text for people, and
        as Python code about ``own``."""
        size = dimension.example
        if not any(self._is_accepted(dimension, other) for other in (size - 1, size + 1) if other):
            step = next((step for step in range(2, size + 1) if self._is_step(dimension, step)), None)
            if step is None:
                return str(size), f"{own} == {size}"
            return f"a multiple of {step}", f"{own} % {step} == 0"
        low = self._last_accepted(dimension, size, 0)
        high = self._last_accepted(dimension, size, FARTHEST * size + 1)
        if high == FARTHEST * size:
            return f"at least {low}", f"{own} >= {low}"
        return f"{low} to {high}", f"{low} <= {own} <= {high}"

    def _is_step(self, dimension: Dimension, step: int) -> bool:
        size = dimension.example
        return size % step == 0 and all(self._is_accepted(dimension, size + k * step) for k in (1, 2))

    def _last_accepted(self, dimension: Dimension, good: int, bad: int) -> int:
        """Return the last size from ``good`` to ``bad`` that breaks no rule: one by one at first, as what
        repeats does so soon, then by bisection."""
        step = 1 if bad > good else -1
        for _ in range(NEAR):
            if good + step == bad or not self._is_accepted(dimension, good + step):
                return good
            good += step
        while abs(good - bad) > 1:
            middle = (good + bad) // 2
            if self._is_accepted(dimension, middle):
                good = middle
            else:
                bad = middle
        return good

    def _is_accepted(self, dimension: Dimension, size: int) -> bool:
        return not self._broken_at(dimension, size) and (dimension.place, size) not in self._refused

    def _broken_at(self, dimension: Dimension, size: int) -> Sequence[SizeRule]:
        key = dimension.place, size
        if key not in self._known:
            changed = {
                each.place: size
                for each in self.sizes.dimensions
                if dimension.place in (each.place, each.root)
            }
            known = {**self.example, **changed}
            program = self.sizes.program
            assert program is not None
            computed = program.sizes(known, self._shapes)
            known.update(computed)
            for place, value in known.items():
                self._values.setdefault(place, set()).add(value)
            if len(computed) < len(program.asked):
                self._refused.add(key)
            self._known[key] = tuple(r for r in self.sizes.rules if r.is_computed and not r.holds(known))
        return self._known[key]
