"""Keeps what Python decides by sizes in a model whose loops are rolled from captures at two lengths."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Graph, Node

from torchq_compat.capture.loops.step_flow import NotALoopError
from torchq_compat.capture.sizes.numbers import (
    OPERATIONS,
    CodePlace,
    Computed,
    Size,
    condition_of,
    map_sizes,
    simplified,
    size_of,
    sizes_in,
)
from torchq_compat.capture.sizes.shape_program import depends_on_values, is_computable
from torchq_compat.capture.sizes.size_reads import Guard, ReadSizes

# What both captures decided alike is a guard of the rolled model too, in terms of its inputs: each trace
# computes the sizes that a decision is about at its own lengths, and they grow evenly in between. What one of
# them decided alone belongs to a loop, as ``range(x.size(1))`` does.


ADD, SUB, MUL, FLOORDIV = (OPERATIONS[name] for name in ("add", "sub", "mul", "floordiv"))


@dataclass(frozen=True)
class Length:
    """One length that the two captures differ in.

    Attributes:
        places: the index and the dimension of each input with this length.
        short: the length in the first capture.
        grown: by how much it is larger in the second; different for each length.
        example: the length in the example.
    """

    places: tuple[tuple[int, int], ...]
    short: int
    grown: int
    example: int

    def size_in(self, inputs: Sequence[Any]) -> Size:
        """Return the length as a size of one of ``inputs``."""
        index, dim = self.places[0]
        return Size(inputs[index], dim)


@dataclass(frozen=True)
class KeptGuards:
    """What two captures of a model decided alike.

    Attributes:
        read: the guards, in terms of the inputs of the rolled model.
        lengths: the lengths that the captures differ in.
        doubtful: for each length, the guards that do not hold at a size up to those of the captures, by that
            size: mostly they are about a step's number, and a trial shows whether they matter.
    """

    read: ReadSizes
    lengths: Sequence[Length]
    doubtful: Sequence[Mapping[int, Sequence[Guard]]]

    def broken_at(self, sizes: Sequence[int]) -> list[Guard]:
        """Return the doubtful guards that do not hold where the lengths are ``sizes``."""
        known = zip(self.doubtful, sizes, strict=True)
        return [guard for of_length, size in known for guard in of_length.get(size, ())]

    def with_guards(self, guards: Iterable[Guard], least: Mapping[int, int], line: str | None) -> ReadSizes:
        """Return what was read, with more ``guards``, and that lengths have the ``least`` sizes, by index."""
        place = CodePlace(line, by_user=True)
        lengths = {self.lengths[index].size_in(self.read.inputs): size for index, size in least.items()}
        bounds = (Guard(Computed(OPERATIONS["ge"], item), True, place) for item in lengths.items())
        return replace(self.read, guards=(*self.read.guards, *guards, *bounds))


def keep_guards(short: ReadSizes, long: ReadSizes, lengths: Sequence[Length]) -> KeptGuards:
    """Return what ``short`` and ``long``, two captures of a model, decided alike; not what they decided about
    sizes that depend on values.

    Raises:
        NotALoopError: a decision is about a size that does not grow evenly with a length, or that only a
            custom module's own computation tells.
    """
    graph = Graph()
    inputs = tuple(None if node is None else graph.node_copy(node) for node in short.inputs)
    longs = [replace(length, short=length.short + length.grown) for length in lengths]
    known = {**short.known, **long.known}
    known |= _at_lengths(short.inputs, inputs, lengths) | _at_lengths(long.inputs, inputs, longs)
    read, computable = ReadSizes(inputs, (), known, {**short.calls, **long.calls}), set[Node]()
    twins = dict(_named(long.guards))
    guards, doubtful = list[Guard](), tuple(dict[int, list[Guard]]() for _ in lengths)
    for name, guard in _named(short.guards):
        if name not in twins or not _has_numbers(guard) or not _has_numbers(twins[name]):
            continue
        expression = _in_lengths(guard, twins[name], short.inputs, inputs, lengths)
        of_modules = [item for item in sizes_in(expression) if not is_computable(item.node, read, computable)]
        if not all(depends_on_values(item.node.graph) for item in of_modules):
            raise NotALoopError(f"{guard.place.line} decides by a size that a custom module computes")
        if of_modules:
            continue  # As of what an encoder of packed sequences returns: trials have to do.
        kept = replace(guard, expression=expression)
        broken = [_broken_at(kept, length, length.size_in(inputs)) for length in lengths]
        if not any(broken):
            guards.append(kept)
        for of_length, sizes in zip(doubtful, broken, strict=True):
            for size in sizes:
                of_length.setdefault(size, []).append(kept)
    return KeptGuards(replace(read, guards=tuple(guards)), lengths, doubtful)


def _named(guards: Sequence[Guard]) -> Iterator[tuple[Any, Guard]]:
    """Yield each guard with its line, what it says of any sizes, and how many before it say the same."""
    counts = Counter[Any]()
    for guard in guards:
        text = condition_of(guard.expression, guard.value, dict.fromkeys(sizes_in(guard.expression), "n"))
        name = guard.place.line, text
        yield (*name, counts[name]), guard
        counts[name] += 1


def _in_lengths(
    guard: Guard,
    twin: Guard,
    own: Sequence[Node | None],
    inputs: Sequence[Node | None],
    lengths: Sequence[Length],
) -> Any:
    """Return the expression of ``guard`` in terms of the lengths and of ``inputs``, which are its ``own``."""

    def in_lengths(size: Size, other: Size) -> Any:
        growth = other.value - size.value
        if not growth:
            return Size(inputs[own.index(size.node)], size.dim) if size.node in own else size
        for length in lengths:
            if growth == length.grown and (size.node in own or len(lengths) > 1):
                return Computed(ADD, (length.size_in(inputs), size.value - length.short))
            if growth % length.grown == 0 and len(lengths) == 1:
                slope = Computed(FLOORDIV, (Computed(SUB, (other, size)), length.grown))
                more = Computed(ADD, (length.size_in(inputs), -length.short))
                return Computed(ADD, (size, Computed(MUL, (slope, more))))
        raise NotALoopError(f"{guard.place.line} decides by a size that does not grow as a length does")

    sizes = zip(sizes_in(guard.expression), sizes_in(twin.expression), strict=True)
    terms = {size: in_lengths(size, other) for size, other in sizes}
    return simplified(map_sizes(guard.expression, terms.__getitem__))


def _has_numbers(guard: Guard) -> bool:
    """Return whether the sizes of ``guard`` are known, and none depends on values."""
    sizes = list(sizes_in(guard.expression))
    return all(
        size.node is not None and type(size_of(size.node.meta["val"], size.dim)) is int for size in sizes
    )


def _broken_at(guard: Guard, length: Length, own: Size) -> list[int]:
    """Return the sizes of ``length``, called ``own``, at which ``guard`` does not hold: up to those of the
    captures, and that of the example."""
    if own not in sizes_in(guard.expression):
        return []

    def is_broken(size: int) -> bool:
        with suppress(ArithmeticError):
            at_size = map_sizes(guard.expression, lambda item: size if item == own else item.value)
            return bool(simplified(at_size) != guard.value)
        return False

    return list(filter(is_broken, {*range(1, length.short + length.grown + 1), length.example}))


def _at_lengths(
    own: Sequence[Node | None], inputs: Sequence[Node | None], lengths: Sequence[Length]
) -> dict[Node, tuple[Any, ...]]:
    """Return each input of a trace with its sizes: those of ``inputs``, but the short ones of ``lengths``."""
    fixed = {place: length.short for length in lengths for place in length.places}
    return {
        node: tuple(fixed.get((index, dim), Size(new, dim)) for dim in range(node.meta["val"].dim()))
        for index, (node, new) in enumerate(zip(own, inputs, strict=True))
        if node is not None
    }
