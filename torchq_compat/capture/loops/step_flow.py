"""Analyzes what the nodes of a loop's step read and return, without changing the graph.

A step reads its own values, values of the step before it (the states), values that are the same for all
steps, and its own part of a tensor. It passes on the states, returns a value of each step, or writes into a
part of a tensor.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Node

from torchq_compat.capture.loops import segments
from torchq_compat.ops import facts, is_pure
from torchq_compat.support.graph_nodes import SLICE_END
from torchq_compat.support.upstream import pytree

ATEN = torch.ops.aten
LeavesOf = Callable[[Node], list[segments.Leaf]]


class NotALoopError(Exception):
    """Repeated nodes are not a loop that can be rolled; the message is the reason."""


@dataclass(frozen=True)
class Inside:
    """A value of the same step, given by the position of its node."""

    position: int


@dataclass(frozen=True)
class Carried:
    """A value of the step before.

    Attributes:
        position: the position of its node.
        first: the node that the first step reads in its place.
    """

    position: int
    first: Node


@dataclass(frozen=True)
class Taken:
    """The part of ``source`` along ``dim`` that belongs to the step.

    Attributes:
        start: the index of the part of the first step.
        slope: by how much the index grows from step to step.
        keeps: whether the part keeps the dimension, with size 1.
    """

    source: Node
    dim: int
    start: int
    slope: int
    keeps: bool


@dataclass(frozen=True)
class Counted:
    """A number that is ``start`` in the first step, and grows by ``slope`` from step to step."""

    start: int
    slope: int


@dataclass(frozen=True)
class Written:
    """The ``value`` that every step writes into its part of ``place.source``."""

    place: Taken
    value: segments.Leaf


Read = Inside | Carried | Counted | Node | Any


@dataclass
class Flow:
    """A loop.

    Attributes:
        steps: the nodes of its steps.
        reads: for each position, what the leaves of the node's arguments refer to.
        taken: the positions that read the part of the step.
        written: the positions that write into the part of the step.
        invariant: the positions that compute the same in every step.
    """

    steps: segments.Steps
    reads: dict[int, list[Read]] = field(default_factory=dict)
    taken: dict[int, Taken] = field(default_factory=dict)
    written: dict[int, Written] = field(default_factory=dict)
    invariant: set[int] = field(default_factory=set)

    @property
    def template(self) -> list[Node]:
        """The nodes of the first step."""
        return [node for node in self.steps[0] if node is not None]

    @cached_property
    def nodes(self) -> set[Node | None]:
        """The nodes of its steps."""
        return {node for step in self.steps for node in step}

    @property
    def covered(self) -> int:
        """The number of nodes in its steps."""
        return sum(node is not None for step in self.steps for node in step)

    @property
    def carried(self) -> list[Carried]:
        """The states, in the order in which they are first read."""
        reads = [read for position in self.body for read in self.reads[position]]
        result = dict.fromkeys(read for read in reads if isinstance(read, Carried))
        # A value that is written counts as read.
        values = [w.value for w in self.written.values() if isinstance(w.value, Carried)]
        return list(dict.fromkeys([*result, *values]))

    @property
    def counted(self) -> list[Counted]:
        """The numbers of the steps, in the order in which they are first read."""
        reads = [read for position in self.body for read in self.reads[position]]
        return list(dict.fromkeys(read for read in reads if isinstance(read, Counted)))

    @property
    def body(self) -> list[int]:
        """The positions that every step computes."""
        skipped = {*self.taken, *self.written, *self.invariant}
        return [position for position in range(len(self.steps[0])) if position not in skipped]

    def is_read_inside(self, position: int) -> bool:
        """Return whether the body or a write reads the value at ``position``."""
        reads = [read for at in self.body for read in self.reads[at]]
        reads += [written.value for written in self.written.values()]
        return any(isinstance(read, Inside) and read.position == position for read in reads)


def flow_of(steps: segments.Steps, leaves_of: LeavesOf) -> Flow:
    """Return the flow of ``steps``.

    Args:
        leaves_of: ``segments.leaves_of``, or what it returned before: most nodes are in many candidates.

    Raises:
        NotALoopError: ``steps`` are not the steps of one loop.
    """
    where = {node: (k, j) for k, step in enumerate(steps) for j, node in enumerate(step) if node is not None}
    flow = Flow(steps)
    for position in range(len(steps[0])):
        _read_position(flow, position, where, leaves_of)
    _check_states(flow)
    return flow


def _read_position(
    flow: Flow, position: int, where: dict[Node, tuple[int, int]], leaves_of: LeavesOf
) -> None:
    nodes = [step[position] for step in flow.steps]
    first = nodes[0]
    assert first is not None
    columns = list(zip(*_leaves_by_step(nodes, leaves_of), strict=True))
    wild = facts(first.target).index if len(leaves_of(first)) == len(first.args) else ()
    at, _ = segments.WITH_NUMBER.get(first.target, (None, None))
    number = None if at is None else len(pytree.tree_leaves(first.args[:at]))
    reads: list[Read] = []
    for index, column in enumerate(columns):
        counted = _counted(column) if index == number else None
        reads.append(counted or (list(column) if index in wild else _read(column, where)))
    if wild and _takes_part(flow, position, nodes, reads, wild):
        return
    reads = [_as_constant(read) if index in wild else read for index, read in enumerate(reads)]
    if segments.writes_in_place(first):
        _write(flow, position, reads, nodes)
        return
    flow.reads[position] = reads
    if (
        is_pure(first)
        and str(first.target).startswith("aten.")
        and all(_is_invariant(flow, read) for read in reads)
    ):
        flow.invariant.add(position)


def _counted(column: tuple[segments.Leaf, ...]) -> Counted | None:
    slope = _slope(column) if all(type(leaf) is int for leaf in column) else 0
    return Counted(column[0], slope) if slope else None


def _slope(numbers: Sequence[int]) -> int:
    """Return by how much ``numbers`` grow from each to the next; 0 if they do not grow evenly."""
    slopes = {after - before for before, after in itertools.pairwise(numbers)}
    return slopes.pop() if len(slopes) == 1 else 0


def _leaves_by_step(nodes: list[Node | None], leaves_of: LeavesOf) -> list[list[segments.Leaf]]:
    known = [None if node is None else leaves_of(node) for node in nodes]
    lengths = {len(leaves) for leaves in known if leaves is not None}
    if len(lengths) != 1:
        raise NotALoopError("the same op has other arguments in other steps")
    return [[None] * max(lengths) if leaves is None else leaves for leaves in known]


def _read(column: tuple[segments.Leaf, ...], where: dict[Node, tuple[int, int]]) -> Read:
    known = [(k, leaf) for k, leaf in enumerate(column) if leaf is not None]
    if not known:
        return None
    if not any(isinstance(leaf, Node) for _, leaf in known):
        return _as_constant(list(column))
    places = [where.get(leaf) for _, leaf in known]
    leaf = known[0][1]
    inside = places[0]
    if inside is not None and all(
        place == (k, inside[1]) for (k, _), place in zip(known, places, strict=True)
    ):
        return Inside(inside[1])
    if all(place is None for place in places) and all(other is leaf for _, other in known):
        return leaf
    before = places[1] if len(places) > 1 else None
    if (
        before is not None
        and inside is None
        and all(p == (k - 1, before[1]) for (k, _), p in zip(known[1:], places[1:], strict=True))
    ):
        return Carried(before[1], leaf)
    raise NotALoopError(f"a step reads {leaf}, which is neither its own nor of the step before it")


def _as_constant(values: Any) -> Any:
    if not isinstance(values, list):
        return values
    known = [value for value in values if value is not None]
    if any(value != known[0] for value in known):
        raise NotALoopError(f"a number changes from step to step: {known}")
    return known[0] if known else None


def _takes_part(
    flow: Flow, position: int, nodes: list[Node | None], reads: list[Read], wild: tuple[int, ...]
) -> bool:
    """Return whether the node at ``position`` reads the part of the step, and record the part in ``flow``."""
    source, dim, starts = reads[0], reads[1], cast("list[Any]", reads[wild[0]])
    node = nodes[0]
    assert node is not None
    value = node.args[0].meta.get("val") if isinstance(node.args[0], Node) else None
    known = [start for start in starts if start is not None]
    slope = _slope(known) if all(isinstance(start, int) for start in known) else 0
    if not slope:
        return False
    keeps = node.target is ATEN.slice.Tensor
    if keeps and (len(reads) < 4 or any(e != s + 1 for s, e in _pairs(starts, cast("list[Any]", reads[3])))):
        return False
    if isinstance(source, Inside) and source.position in flow.invariant:
        source = flow.steps[0][source.position]
    if not isinstance(source, Node) or not isinstance(value, Tensor):
        return False
    if len(known) < len(starts):
        raise NotALoopError("the last step does not read its part")
    start = known[0] if known[0] >= 0 else known[0] + int(value.shape[int(cast(int, dim))])
    flow.taken[position] = Taken(source, int(cast(int, dim)) % value.dim(), start, slope, keeps)
    return True


def _pairs(starts: list[Any], ends: list[Any]) -> Iterator[tuple[int, int]]:
    for start, end in zip(starts, ends, strict=True):
        if start is not None:
            # -1:0 would be empty: the slice that starts at -1 ends at the end of the dimension.
            yield start, (start + 1 if start == -1 and end in (None, SLICE_END) else end)


def _write(flow: Flow, position: int, reads: list[Read], nodes: list[Node | None]) -> None:
    node = nodes[0]
    assert node is not None
    view, value = reads[0], reads[1]
    if (
        node.target is not ATEN.copy_.default
        or not isinstance(view, Inside)
        or view.position not in flow.taken
    ):
        raise NotALoopError(f"{node} writes into a tensor")
    viewed = flow.steps[0][view.position]
    assert viewed is not None
    target, given = viewed.meta["val"], node.args[1].meta.get("val")  # type: ignore[union-attr]
    same = isinstance(given, Tensor) and str(given.shape) == str(target.shape) and given.dtype == target.dtype
    if not same or len(viewed.users) > 1:
        raise NotALoopError(f"{node} writes what has another shape or dtype, or is read again")
    place = flow.taken[view.position]
    if place.slope not in (1, -1):
        raise NotALoopError(f"{node} writes every {abs(place.slope)}th part")
    parts = {step[view.position] for step in flow.steps}
    inside, is_input = flow.nodes, place.source.op != "call_function"
    if is_input or any(user in inside and user not in parts for user in place.source.users):
        raise NotALoopError(f"{node} writes into {place.source}, which the loop reads")
    if any(user in inside for step in flow.steps if (n := step[position]) is not None for user in n.users):
        raise NotALoopError(f"{node} is read again")
    flow.written[position] = Written(place, value)


def _is_invariant(flow: Flow, read: Read) -> bool:
    if isinstance(read, Inside):
        return read.position in flow.invariant
    return not isinstance(read, (Carried, Counted))


def _check_states(flow: Flow) -> None:
    for state in flow.carried:
        first, after = state.first.meta.get("val"), flow.template[state.position].meta.get("val")
        if state.position in flow.taken or state.position in flow.invariant:
            raise NotALoopError("a step reads the part of the step before it")
        if not isinstance(first, Tensor) or not isinstance(after, Tensor):
            raise NotALoopError("a state is no tensor")
        if str(first.shape) != str(after.shape) or first.dtype != after.dtype:
            raise NotALoopError(f"a state grows: {tuple(first.shape)} becomes {tuple(after.shape)}")
