"""Finds what sizes a captured graph accepts: by its guards, by running it on shapes, or from
``dynamic_shapes``.
"""

import ast
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import SymInt, Tensor
from torch.fx import GraphModule, Node

from torchq_compat.capture.sizes.input_sizes import (
    COMMON,
    FARTHEST,
    Dimension,
    InputSizes,
    Place,
    SizeRule,
    accepted_range,
    range_around,
    sizes_of,
)
from torchq_compat.capture.sizes.numbers import Size, condition_of, simplified, sizes_in
from torchq_compat.capture.sizes.shape_program import ShapeProgram, is_computable
from torchq_compat.capture.sizes.size_reads import ReadSizes
from torchq_compat.support.upstream import limits_of

# Finds what sizes a captured graph accepts: by its guards, and by running it on shapes at other sizes.


#: (size in the example, dimension for a size of 1, else -1). Sizes of 1 are mostly equal by chance, so they
#: belong together only if they have the same dimension index.
Group = tuple[int, int]
#: The groups of sizes that change -> their new sizes.
SizeGroups = Mapping[Group, int]
Sizes = Mapping[Place, int]
#: How far from the example's size it is looked for sizes that only one rule refuses.
NEARBY = 40
#: In place of the line of a rule that comes from the limits of a ``Dim``.
GIVEN = "dynamic_shapes"


def group_of(dimension: Dimension) -> Group:
    """Return the group of dimensions that change together with ``dimension``: in the example they have the
    same size, because they are the batch of all inputs, or the length of all sequences."""
    return dimension.example, dimension.index if dimension.example == 1 else -1


def sizes_at(sizes: InputSizes, groups: SizeGroups) -> dict[Place, int]:
    """Return the size of each dimension where ``groups`` have those sizes, and what depends on them too."""
    result = {item.place: groups.get(group_of(item), item.example) for item in sizes.free}
    for dimension in sizes.dimensions:
        if not dimension.is_free:
            result[dimension.place] = dimension.example if dimension.root is None else result[dimension.root]
    return result


def find_sizes(inputs: Mapping[str, Any], read: ReadSizes, accepts: Callable[[Sizes], bool]) -> InputSizes:
    """Return the sizes that a graph, which was captured with ``inputs`` by label, accepts.

    Args:
        read: what the model's Python asked of sizes.
        accepts: returns whether the graph, or the float model, runs at given sizes of the inputs.
    """
    example, sizes = sizes_of(inputs), _sizes_of_reads(inputs, read)
    search = _Search(sizes, example, accepts)
    own = search.own_sizes()
    operators = tuple(search.rules_of_operators(own, sizes.rules))
    result = replace(sizes, dimensions=tuple(own), rules=(*sizes.rules, *operators))
    return accepted_range(result, example)


def rules_of_reads(inputs: Mapping[str, Any], read: ReadSizes) -> tuple[SizeRule, ...]:
    """Return what Python asked of sizes as rules on those of ``inputs``, by label."""
    return accepted_range(_sizes_of_reads(inputs, read), sizes_of(inputs)).rules


def _sizes_of_reads(inputs: Mapping[str, Any], read: ReadSizes) -> InputSizes:
    dimensions = tuple(Dimension(*place, int(size)) for place, size in sizes_of(inputs).items())
    constants = {label: value for label, value in inputs.items() if not isinstance(value, Tensor)}
    program, rules = _rules_of_guards(inputs, read, dimensions)
    return InputSizes(dimensions, constants, rules, program)


def admit_ones(sizes: InputSizes, group: Group, example: Sizes) -> InputSizes:
    """Return ``sizes`` that accept 1 in all dimensions of ``group`` at a time, too, as far as Python decided
    otherwise there."""
    members = {
        f"s{n}": item for n, item in enumerate(sizes.dimensions) if item.is_free and group_of(item) == group
    }
    places = {name: item.place for name, item in members.items()}
    known = sizes.with_computed(sizes_at(sizes, {group: 1}))
    are_ones = " and ".join(f"{name} == 1" for name in members)
    rules: list[SizeRule] = []
    for rule in sizes.rules:
        if rule.line is None or rule.holds(known):  # It is an operator's.
            rules.append(rule)
            continue
        condition, of_both = f"({rule.condition}) or {are_ones}", {**rule.places, **places}
        admitting = replace(rule, condition=condition, places=of_both)
        if rule.is_computed or _refuses(admitting, example):
            rules.append(admitting)
    return accepted_range(replace(sizes, rules=tuple(rules)), example)


def admit_equal(
    sizes: InputSizes, rule: SizeRule, example: Sizes
) -> tuple[InputSizes, list[dict[Place, int]]]:
    """Return ``sizes`` without ``rule``, and sizes that only it refuses, to try; none unless it is Python's,
    and refuses where two sides are equal, as in ``if padding > 0``. Where the trials agree, see
    ``accepted_range``."""
    condition = ast.parse(rule.condition, mode="eval").body
    if not rule.by_python or not isinstance(condition, ast.Compare) or len(condition.ops) > 1:
        return sizes, []
    if not isinstance(condition.ops[0], (ast.NotEq, ast.Gt, ast.Lt)):
        return sizes, []
    sides = map(ast.unparse, (condition.left, *condition.comparators))
    equal = replace(rule, condition=" == ".join(f"({side})" for side in sides))
    fewer = replace(sizes, rules=tuple(item for item in sizes.rules if item.condition != rule.condition))
    size, group, refused = rule.dimension.example, group_of(rule.dimension), list[dict[Place, int]]()
    near = range(max(1, size - NEARBY), size + NEARBY)
    far = (*(size * part // 8 for part in range(1, 8)), *(size * times for times in (2, 3, 4, 8)))
    for other in (*near, *far, *(() if rule.is_computed else COMMON)):
        known = sizes_at(sizes, {group: other})
        computed = sizes.with_computed(known)
        if not rule.holds(computed) and not equal.holds(computed):
            return sizes, []
        if other in near and not rule.holds(computed) and fewer.broken_rule(known) is None:
            refused.append(known)
    return fewer, [*refused[:1], *refused[1:][-1:]]


def _refuses(rule: SizeRule, example: Sizes) -> bool:
    """Return whether a size breaks ``rule``: each up to four times that of the example, and large ones."""
    near = max(64, FARTHEST * max(example.values()))
    tried = [*range(1, near + 1), *(1 << power for power in range(10, 31))]
    return any(not rule.holds({**example, place: size}) for place in rule.places.values() for size in tried)


def _rules_of_guards(
    inputs: Mapping[str, Any], read: ReadSizes, dimensions: Sequence[Dimension]
) -> tuple[ShapeProgram | None, tuple[SizeRule, ...]]:
    """Return the rules that follow from guards, and the program of the sizes that no input has."""
    labels = dict(zip(read.inputs, inputs, strict=False))
    by_place = {dimension.place: dimension for dimension in dimensions}
    asked: dict[tuple[Node, int | None], int] = {}
    rules: dict[str, SizeRule] = {}
    computable: set[Node] = set()
    for guard in read.guards:
        if not all(is_computable(size.node, read, computable) for size in sizes_in(guard.expression)):
            for number, item in enumerate(dimensions):
                rule = SizeRule.fixing(number, item, guard.place.line, by_python=guard.place.by_user)
                rules[rule.condition] = rule
            continue
        expression = simplified(guard.expression)
        names: dict[Size, str] = {}
        places: dict[str, Place] = {}
        for size in sizes_in(expression):
            if size.node in labels and size.dim is not None:
                place = labels[size.node], size.dim
            else:
                place = "", asked.setdefault((size.node, size.dim), len(asked))
            names[size] = f"s{list(by_place).index(place)}" if place[0] else f"t{place[1]}"
            places[names[size]] = place
        if not names:
            continue  # It has the same value at all sizes.
        condition = condition_of(expression, guard.value, names)
        named = [by_place[place] for place in places.values() if place in by_place]
        dimension = named[0] if named else dimensions[0]
        rule = SizeRule(condition, places, dimension, "", guard.place.line, guard.place.by_user)
        rules[condition] = replace(rule, expected=_words(rule, by_place))
    program = ShapeProgram.of_sizes(list(asked), read, inputs) if asked else None
    return program, tuple(rules.values())


def _words(rule: SizeRule, dimensions: Mapping[Place, Dimension]) -> str:
    """Return the condition of ``rule`` for people, with sizes such as ``x.size(0)``."""
    fixed = f"{next(iter(rule.places))} == {rule.dimension.example}"
    if rule.condition == fixed and not rule.is_computed:
        return str(rule.dimension.example)
    (own, place), *others = rule.places.items()
    if not others and place in dimensions:
        words, code = range_around(dimensions[place].example, lambda size: rule.holds({place: size}), own)
        plain = replace(rule, condition=code)
        if all(plain.holds({place: size}) == rule.holds({place: size}) for size in COMMON):
            return words
    text = ast.unparse(ast.parse(rule.condition, mode="eval"))  # without parentheses that say nothing
    for name, place in sorted(rule.places.items(), key=lambda item: -len(item[0])):
        if place in dimensions:
            text = text.replace(name, dimensions[place].name)
    return text


@dataclass
class _Search:
    """Tries which dimensions have a size of their own."""

    sizes: InputSizes
    example: dict[Place, int]
    accepts: Callable[[Sizes], bool]
    _known: dict[tuple[int, ...], bool] = field(default_factory=dict)

    def own_sizes(self) -> list[Dimension]:
        """Return the dimensions, each with its root, or fixed, or free."""
        matches: dict[Place, Dimension] = {}
        groups: dict[Group, list[Dimension]] = {}
        for dimension in self.sizes.dimensions:
            groups.setdefault(group_of(dimension), []).append(dimension)
        for members in groups.values():
            free = [member for member in members if self._may_change([member])]
            matches.update((entry.place, entry) for entry in free)
            for element in members:
                if element.place not in matches:
                    matches.update(self._related(element, members, free))
        stuck = [item for item in self.sizes.dimensions if item.place not in matches]
        # A guard relates it to others, as the batch times the number of heads: the guard says what fits.
        related = {p for rule in self.sizes.rules if len(rule.places) > 1 for p in rule.places.values()}
        alike: dict[tuple[int, int], list[Dimension]] = {}
        for element in stuck:
            alike.setdefault((element.example, element.index), []).append(element)
        for element in stuck:
            members, root = alike[element.example, element.index], None
            is_fixed = element.place not in related and not self._may_change_with_any([element], alike)
            if is_fixed and len(members) > 1 and self._may_change_with_any(members, alike):
                is_fixed, root = False, None if element is members[0] else members[0].place
            matches[element.place] = replace(element, is_fixed=is_fixed, root=root)
        return [matches[dimension.place] for dimension in self.sizes.dimensions]

    def _related(
        self, anchor: Dimension, members: Sequence[Dimension], free: Sequence[Dimension]
    ) -> dict[Place, Dimension]:
        """Return ``anchor`` and the dimensions without which it cannot change, each with its root; nothing if
        it cannot change together with others of its group."""
        together = next((entry for entry in self._sets(anchor, members) if self._may_change(entry)), None)
        if together is None:
            return {}
        needed = list(together)
        for item in together:
            fewer = [other for other in needed if other is not item]
            if item is not anchor and len(fewer) > 1 and self._may_change(fewer):
                needed = fewer
        root = next((element for element in needed if element in free), needed[0])
        own = (member for member in needed if member not in free)
        return {bound.place: bound if bound is root else replace(bound, root=root.place) for bound in own}

    def _sets(self, anchor: Dimension, members: Sequence[Dimension]) -> Iterator[list[Dimension]]:
        """Yield sets of ``members`` that may be one size, ``anchor`` among them: those that guards say are
        equal, all, those at the same index, all but those at another index, pairs, and all but one."""
        equal = {anchor.place}
        for rule in (*self.sizes.rules, *reversed(self.sizes.rules)):
            places = set(rule.places.values())
            if " == " in rule.condition and len(places) == 2 and places & equal:
                equal |= places
        indices = dict.fromkeys(member.index for member in members)
        sets = [
            [item for item in members if item.place in equal],
            list(members),
            [element for element in members if element.index == anchor.index],
            *(
                [bound for bound in members if bound.index != index]
                for index in indices
                if index != anchor.index
            ),
            *([anchor, other] for other in members if other is not anchor),
            *([entry for entry in members if entry is not other] for other in members if other is not anchor),
        ]
        for number, result in enumerate(sets):
            if len(result) > 1 and result not in sets[:number]:
                yield result

    def _may_change_with_any(
        self, members: Sequence[Dimension], alike: Mapping[tuple[int, int], Sequence[Dimension]]
    ) -> bool:
        """Return whether ``members``, of one size, may change if a dimension of another size does, as in
        ``x + y[::2]``, or several that are ``alike``, of one size and index."""
        changes = ((2, 0, 2, 0), (1, 1, 1, 1), (1, 1, 1, 2), (1, 2, 1, 1))
        labels, size = {item.label for item in members}, members[0].example
        single = [[other] for other in self.sizes.dimensions if other.label not in labels]
        several = [group for group in alike.values() if len(group) > 1 and group[0].example != size]
        for others in (*single, *several):
            for times, more, other_times, other_more in changes:
                changed = {item.place: times * size + more for item in members}
                changed |= {item.place: other_times * item.example + other_more for item in others}
                if self._runs(changed):
                    return True
        return False

    def _may_change(self, members: Sequence[Dimension], to: Sequence[int] = ()) -> bool:
        size = members[0].example
        if not size:
            return True
        others = to or [other for other in (size + 1, 2 * size, size - 1, 4 * size) if other > 1 or size == 1]
        return any(self._runs({member.place: other for member in members}) for other in others)

    def _runs(self, changed: Sizes) -> bool:
        values = {**self.example, **changed}
        key = tuple(values.values())
        if key not in self._known:
            self._known[key] = self.sizes.broken_rule(values) is None and self.accepts(values)
        return self._known[key]

    def rules_of_operators(
        self, dimensions: Sequence[Dimension], known: Sequence[SizeRule]
    ) -> Iterator[SizeRule]:
        """Yield a rule for each dimension that operators fix, or relate to another one; 1 may do as well."""
        free = {item.place for item in dimensions if item.is_free and self._may_change([item])}
        for number, dimension in enumerate(dimensions):
            if dimension.is_free or any(_is_about(rule, dimension) for rule in known):
                continue
            own, size = f"s{number}", dimension.example
            may_be_one = size != 1 and self._may_change([dimension], [1])
            or_one = f" or {own} == 1" if may_be_one else ""
            if dimension.root in free:
                or_one = f" or {own} == {size}"
            places = {own: dimension.place}
            if dimension.is_fixed:
                words = f"{size} or 1" if may_be_one else str(size)
                yield SizeRule(f"{own} == {size}{or_one}", places, dimension, words)
                continue
            at = next(index for index, entry in enumerate(dimensions) if entry.place == dimension.root)
            root = dimensions[at]
            places[f"s{at}"] = root.place
            if size != 1 and self._may_change([root], [1]):
                or_one += f" or s{at} == 1"
            words = f"{dimension.name} == {root.name}{', or ' + or_one.split()[-1] if or_one else ''}"
            yield SizeRule(f"{own} == s{at}{or_one}", places, dimension, words)


def _is_about(rule: SizeRule, dimension: Dimension) -> bool:
    """Return whether ``rule`` says which size ``dimension`` has, or which size it is equal to."""
    if " == " not in rule.condition or dimension.place not in rule.places.values():
        return False
    return rule.expected == str(dimension.example) or (
        dimension.root is not None and set(rule.places.values()) == {dimension.place, dimension.root}
    )


# The sizes of a graph that torch.export captured with the user's ``dynamic_shapes``.


#: ``L['x'].size()[0]``, as a guard of torch.export names a size.
SIZE = re.compile(r"L\['(?P<name>\w+)'\](?P<path>(?:\[[^\]]+\]|\.\w+)*)\.size\(\)\[(?P<dim>\d+)\]")


def sizes_of_symbols(
    graph_module: GraphModule,
    inputs: Mapping[str, Any],
    read: ReadSizes,
    conditions: Sequence[str],
    *,
    has_limits: bool,
) -> InputSizes:
    """Return the sizes of the placeholders of ``graph_module``.

    Args:
        inputs: the example inputs by label.
        read: what Python asked of sizes before this capture.
        conditions: what torch.export assumes of the sizes, as Python code.
        has_limits: whether the user gave it limits of sizes.
    """
    dimensions: list[Dimension] = []
    roots: dict[str, Place] = {}
    limits: list[SizeRule] = []
    specialized: set[Place] = set()
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    for node, (label, example) in zip(placeholders, inputs.items(), strict=True):
        value = node.meta.get("val")
        for index, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
            known = int(example.shape[index])
            if not isinstance(size, SymInt) or size.node.maybe_as_int() is not None:
                dimensions.append(Dimension(label, index, known, is_fixed=True))
                if isinstance(size, SymInt) or known == 1:  # torch.export makes no symbol of a size of 1.
                    specialized.add((label, index))
                continue
            root = roots.setdefault(str(size), (label, index))
            dimensions.append(Dimension(label, index, known, None if root == (label, index) else root))
            if has_limits:
                limits += _rules_of_limits(len(dimensions) - 1, dimensions[-1], *limits_of(size))
    constants = {label: value for label, value in inputs.items() if not isinstance(value, Tensor)}
    rules = (
        *_rules_of_dimensions(dimensions, specialized),
        *_rules_of_conditions(dimensions, conditions),
        *limits,
    )
    program, of_guards = _rules_of_guards(inputs, read, dimensions)
    result = InputSizes(tuple(dimensions), constants, (*rules, *of_guards), program)
    return accepted_range(result, sizes_of(inputs))


def _rules_of_dimensions(
    dimensions: Sequence[Dimension], specialized: Collection[Place]
) -> Iterator[SizeRule]:
    numbers = {dimension.place: number for number, dimension in enumerate(dimensions)}
    for number, dimension in enumerate(dimensions):
        if dimension.is_fixed:
            yield SizeRule.fixing(number, dimension, by_python=dimension.place in specialized)
        elif dimension.root is not None:
            other = numbers[dimension.root]
            places = {f"s{number}": dimension.place, f"s{other}": dimension.root}
            words = f"{dimension.name} == {dimensions[other].name}"
            yield SizeRule(f"s{number} == s{other}", places, dimension, words)


def _rules_of_limits(number: int, dimension: Dimension, low: int, high: int | None) -> Iterator[SizeRule]:
    """Yield the rule that a size is from ``low`` to ``high``: beyond, Python may decide otherwise, for which
    torch.export has no condition."""
    places = {f"s{number}": dimension.place}
    # torch.export takes sizes to be neither 0 nor 1; its graphs run at these all the same.
    if low > 2:
        yield SizeRule(f"s{number} >= {low}", places, dimension, f"at least {low}", GIVEN)
    if high is not None:
        yield SizeRule(f"s{number} <= {high}", places, dimension, f"at most {high}", GIVEN)


def _rules_of_conditions(dimensions: Sequence[Dimension], conditions: Sequence[str]) -> Iterator[SizeRule]:
    numbers = {dimension.place: number for number, dimension in enumerate(dimensions)}
    for condition in conditions:
        result = {
            match[0]: (f"{match['name']}{match['path']}", int(match["dim"]))
            for match in SIZE.finditer(condition)
        }
        if not result or any(place not in numbers for place in result.values()):
            continue
        code, words = condition, condition
        for text, place in result.items():
            code = code.replace(text, f"s{numbers[place]}")
            words = words.replace(text, dimensions[numbers[place]].name)
        places = {f"s{numbers[place]}": place for place in result.values()}
        # torch.export takes sizes to be neither 0 nor 1; its graphs run at these all the same.
        if re.fullmatch(r"s\d+ (?:!= [01]|>= 2|> 1|>= 1|> 0)", code):
            continue
        dimension = dimensions[numbers[next(iter(result.values()))]]
        if dimension.is_fixed and len(result) == 1:
            continue
        yield SizeRule(code, places, dimension, words)
