"""Rolls the loops of an unrolled graph, in place: each becomes one call of a ``Loop``."""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from torchq_compat.capture.loops.loop_module import LoopForm, Part
from torchq_compat.capture.loops.segments import WITH_NUMBER, candidates, computes_number, tidy_graph
from torchq_compat.capture.loops.step_flow import (
    Carried,
    Counted,
    Flow,
    Inside,
    NotALoopError,
    Read,
    Taken,
    flow_of,
)
from torchq_compat.capture.opaque_stub import OPAQUE_OP, StubRegistry
from torchq_compat.capture.writes import scatter_of, scatters
from torchq_compat.ops import those
from torchq_compat.support.graph_nodes import SLICE_END, replace_node
from torchq_compat.support.upstream import pytree

ATEN = torch.ops.aten


@dataclass(frozen=True)
class RolledLoop:
    """One loop.

    Attributes:
        name: the path that its node calls.
        graph: the graph of one step.
        form: the form of its inputs and results.
        count: the number of steps in the unrolled graph.
    """

    name: str
    graph: Graph
    form: LoopForm
    count: int


@dataclass
class RolledGraph:
    """A graph and the loops it calls.

    Attributes:
        reasons: why repeated ops were not rolled.
    """

    graph_module: GraphModule
    loops: list[RolledLoop] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


def roll_graph(
    graph_module: GraphModule,
    stubs: StubRegistry,
    names: Sequence[str],
    lengths: Collection[tuple[int, int]],
) -> RolledGraph:
    """Roll every loop of ``graph_module``, whose custom modules are opaque calls of ``stubs``.

    Args:
        names: free paths for the loops; their number limits the number of loops.
        lengths: the lengths of the loops, each by the index of an input and the dimension.
    """
    rolled = RolledGraph(graph_module)
    for name in names:
        tidy_graph(graph_module, stubs, lengths)
        result = _first_loop(graph_module, stubs, rolled)
        if result is None:
            break
        rolled.loops.append(_Roller(graph_module, result, name).roll())
        graph_module.graph.eliminate_dead_code()
        graph_module.graph.lint()
    return rolled


def _first_loop(graph_module: GraphModule, stubs: StubRegistry, rolled: RolledGraph) -> Flow | None:
    flows: list[Flow] = []
    for steps in candidates(graph_module, stubs):
        try:
            flow = flow_of(steps)
            _check_results(flow)
        except NotALoopError as reason:
            rolled.reasons.append(str(reason))
            continue
        if flow.body:
            flows.append(flow)
    # Of overlapping candidates, keep the one that covers most; return the first in the graph, so that the
    # choice does not depend on the lengths.
    order = {node: index for index, node in enumerate(graph_module.graph.nodes)}
    chosen: list[tuple[int, int, Flow]] = []
    for flow in sorted(flows, key=lambda flow: (-flow.covered, len(flow.carried))):
        places = [order[node] for step in flow.steps for node in step if node is not None]
        start, end = min(places), max(places)
        if all(end < other or start > last for other, last, _ in chosen):
            chosen.append((start, end, flow))
    return min(chosen, key=lambda item: item[0])[2] if chosen else None


def _check_results(flow: Flow) -> None:
    """Raise if the last step lacks values that other steps return, or if every step writes the same."""
    last = flow.steps[-1]
    missing = {position for position, node in enumerate(last) if node is None}
    if any(taken.slope < -1 for taken in flow.taken.values()):
        raise NotALoopError("its steps go backwards, and leave out parts")
    for written in flow.written.values():
        if isinstance(written.value, Node) or not isinstance(written.value, (Inside, Carried)):
            raise NotALoopError("every step writes the same")
    for position in missing:
        if any(node is not None and _outside(flow, node) for node in (step[position] for step in flow.steps)):
            raise NotALoopError("the last step lacks values that other steps return")


def _outside(flow: Flow, node: Node) -> list[Node]:
    inside = {item for step in flow.steps for item in step}
    return [user for user in node.users if user not in inside]


@dataclass
class _Roller:
    graph_module: GraphModule
    flow: Flow
    name: str
    values: dict[tuple[Read, int], int] = field(default_factory=dict)
    stacked: list[tuple[Read, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.steps = self.flow.steps
        self.where = {
            n: (k, j) for k, step in enumerate(self.steps) for j, n in enumerate(step) if n is not None
        }
        self.order = {node: index for index, node in enumerate(self.graph_module.graph.nodes)}
        self.states = self.flow.carried

    def roll(self) -> RolledLoop:
        flow, graph = self.flow, self.graph_module.graph
        self._keep_invariants()
        replaced = list(self._plan_uses())
        taken = self._taken()
        same = self._same()
        last = max(
            (node for step in self.steps for node in step if node is not None), key=self.order.__getitem__
        )
        with graph.inserting_after(last):
            anchor = graph.call_function(operator.add, (0, 0))
        with graph.inserting_before(anchor):
            wholes = self._wholes([flow.taken[position] for position in taken])
            for number in flow.counted:
                end = number.start + number.slope * len(self.steps)
                wholes.append(self.call(ATEN.arange.start_step, number.start, end, number.slope))
            if not wholes:
                wholes = [self.call(ATEN.arange.default, len(self.steps))]
            self.graph_module.add_module(self.name, nn.Identity())
            call = graph.call_module(self.name, ([s.first for s in self.states], wholes, list(same)))
            values = [
                *(state.first.meta["val"] for state in self.states),
                *map(self._stacked_value, self.stacked),
            ]
            results = []
            for index, value in enumerate(values):
                results.append(graph.call_function(operator.getitem, (call, index)))
                results[-1].meta["val"] = value
            self._write_results(results)
        for use in replaced:
            with graph.inserting_before(use.user):
                use.apply(self, results)
        graph.erase_node(anchor)
        form = LoopForm(
            len(self.states),
            (*(_part(flow.taken[p]) for p in taken), *[Part(0)] * len(flow.counted)) or (Part(0),),
            tuple(dim for _, dim in self.stacked),
            counted=not taken and not flow.counted,
        )
        body = self._body(taken, same)
        self._erase()
        return RolledLoop(self.name, body, form, len(self.steps))

    def call(self, target: Any, *args: Any) -> Node:
        """Insert a call of ``target`` at the graph's insertion point."""
        node = self.graph_module.graph.call_function(target, args)
        values = pytree.tree_map(lambda leaf: leaf.meta["val"] if isinstance(leaf, Node) else leaf, args)
        node.meta["val"] = target(*values)
        return node

    def _stacked_value(self, key: tuple[Read, int]) -> Tensor:
        read, dim = key
        assert isinstance(read, (Inside, Carried))
        node = self.flow.template[read.position]
        return torch.stack([node.meta["val"]] * len(self.steps), dim)

    def _keep_invariants(self) -> None:
        for position in self.flow.invariant:
            kept = self.steps[0][position]
            assert kept is not None
            for step in self.steps[1:]:
                node = step[position]
                if node is not None:
                    node.replace_all_uses_with(kept)

    def value(self, read: Read, dim: int) -> int:
        """Return the index of the result that stacks ``read`` of all steps along ``dim``."""
        key = (read, dim)
        if key not in self.values:
            self.values[key] = len(self.stacked)
            self.stacked.append(key)
        return self.values[key] + len(self.states)

    def values_read(self, user: Node) -> list[Node]:
        """Return the nodes of steps, other than parts and invariants, that ``user`` reads."""
        kept = {*self.flow.invariant, *self.flow.taken}
        return [
            node for node in user.all_input_nodes if node in self.where and self.where[node][1] not in kept
        ]

    def _plan_uses(self) -> Iterator[_Use]:
        """Yield the nodes behind the loop that read nodes of steps, with the results to read instead."""
        users: dict[Node, None] = {}
        for step in self.steps:
            for position, node in enumerate(step):
                if node is not None and position not in {*self.flow.invariant, *self.flow.taken}:
                    users.update(dict.fromkeys(_outside(self.flow, node)))
        for user in sorted(users, key=self.order.__getitem__):
            if user.target in those("joins"):
                yield _ListUse.plan(self, user)
            else:
                yield _SingleUse.plan(self, user)
        for written in self.flow.written.values():
            self.value(written.value, written.place.dim)

    def _write_results(self, results: Sequence[Node]) -> None:
        count, current = len(self.steps), dict[Node, Node]()
        for write in self.flow.written.values():
            place = write.place
            whole = results[self.value(write.value, place.dim)]
            if place.slope < 0:
                whole = self.call(ATEN.flip.default, whole, [place.dim])
            if place.keeps:
                whole = self.call(ATEN.flatten.using_ints, whole, place.dim, place.dim + 1)
            start, end = _bounds(place, count)
            old: Any = place.source
            new = self.call(ATEN.slice_scatter.default, current.get(old, old), whole, place.dim, start, end)
            current[old] = new
            while scatters(old):
                old, view = old.args[0], old
                new = self.call(scatter_of(view), current.get(old, old), new, *view.args[1:])
                current[old] = new
        last = max(map(self.order.__getitem__, self.where))

        @functools.cache
        def written(old: Node) -> Node:
            """Return ``old`` behind the loop; a view stays one, because more may be written into it."""
            if not scatters(old):
                return current[old]
            return self.call(old.target, written(old.args[0]), *old.args[1:])  # type: ignore[arg-type]

        for old in current:
            for user in list(old.users):
                if self.order.get(user, 0) > last and user not in self.where:
                    user.replace_input_with(old, written(old))

    def _taken(self) -> list[int]:
        return [p for p in self.flow.taken if self.flow.is_read_inside(p)]

    def _wholes(self, taken: Sequence[Taken]) -> list[Node]:
        wholes = [self._part_of(element) for element in taken]
        strided = [(whole, member) for whole, member in zip(wholes, taken, strict=True) if member.slope > 1]
        sizes = [self.call(ATEN.sym_size.int, whole, entry.dim) for whole, entry in strided]
        if len(sizes) == 1 or not sizes:
            return wholes
        # Of some parts there may be one more than there are steps.
        count = functools.reduce(lambda one, other: self.call(torch.sym_min, one, other), sizes)
        if count.meta["val"] != len(self.steps):
            raise NotALoopError("the loop ends before the tensors that it reads")
        return [
            self.call(ATEN.slice.Tensor, whole, item.dim, 0, count) if item.slope > 1 else whole
            for whole, item in zip(wholes, taken, strict=True)
        ]

    def _part_of(self, taken: Taken) -> Node:
        start, end = _bounds(taken, len(self.steps))
        size = taken.source.meta["val"].shape[taken.dim]
        if abs(taken.slope) > 1:
            # How many steps are left out behind the last is decided by the size.
            return self.call(ATEN.slice.Tensor, taken.source, taken.dim, start, SLICE_END, taken.slope)
        if start == 0 and size == end:
            return taken.source
        end = SLICE_END if size == end else end
        return self.call(ATEN.slice.Tensor, taken.source, taken.dim, start, end)

    def _same(self) -> dict[Node, None]:
        """Return the tensors outside the loop that every step reads."""
        matches: dict[Node, None] = {}
        reads = (self._outer(read) for position in self.flow.body for read in self.flow.reads[position])
        waiting = [node for node in reads if node is not None]
        while waiting:
            node = waiting.pop(0)
            if isinstance(node.meta.get("val"), Tensor) and node.op != "get_attr":
                matches[node] = None
            elif computes_number(node):
                waiting.extend(node.all_input_nodes)
            elif node.op != "get_attr":
                raise NotALoopError(f"a step reads {node}, which is no tensor")
        return matches

    def _outer(self, read: Read) -> Node | None:
        """Return the node outside the body that ``read`` refers to, or None."""
        if isinstance(read, Inside) and read.position in self.flow.invariant:
            return self.steps[0][read.position]
        return read if isinstance(read, Node) else None

    def _body(self, taken: list[int], same: Mapping[Node, None]) -> Graph:
        graph = Graph()
        result: dict[Any, Node] = {}
        for index, state in enumerate(self.states):
            result[state] = graph.placeholder(f"state_{index}")
        parts = [*map(Inside, taken), *self.flow.counted]
        result.update({read: graph.placeholder(f"part_{index}") for index, read in enumerate(parts)})
        for index, node in enumerate(same):
            result[node] = graph.placeholder(f"same_{index}")
        for position in taken:
            place, part = self.flow.taken[position], result[Inside(position)]
            if place.keeps:
                result[Inside(position)] = graph.call_function(ATEN.unsqueeze.default, (part, place.dim))

        def outside(node: Node) -> Node:
            if node not in result:
                result[node] = graph.node_copy(node, outside)
                result[node].meta = _origin(node)
            return result[node]

        def value(read: Read) -> Any:
            outer = self._outer(read)
            if outer is not None:
                return outside(outer)
            return result[read] if isinstance(read, (Inside, Carried, Counted)) else read

        for position in self.flow.body:
            node = self.flow.template[position]
            leaves = iter([value(read) for read in self.flow.reads[position]])
            args = node.args[:3] if node.target is OPAQUE_OP else node.args
            args, kwargs = pytree.tree_map(lambda _leaf: next(leaves), (args, node.kwargs))  # noqa: B023
            if node.target is OPAQUE_OP:
                args = (*args, node.args[3])
            target: Any = node.target
            if any(isinstance(read, Counted) for read in self.flow.reads[position]):
                target = WITH_NUMBER[target][1]
                if target is ATEN.expand.default:
                    number = graph.call_function(ATEN.to.dtype, (args[1], node.meta["val"].dtype))
                    args, kwargs = (number, args[0]), {}
            copied = graph.call_function(target, args, kwargs)
            copied.meta = _origin(node)
            result[Inside(position)] = copied
        news = [result[Inside(state.position)] for state in self.states]
        graph.output((*news, *(value(read) for read, _ in self.stacked)))
        return graph

    def _erase(self) -> None:
        graph = self.graph_module.graph
        for node in sorted(self.where, key=self.order.__getitem__, reverse=True):
            position = self.where[node][1]
            if position in self.flow.invariant and node is self.steps[0][position]:
                continue
            if position in self.flow.taken and node.users:
                continue
            if node.users:
                raise AssertionError(f"{node} is read by {list(node.users)}")
            graph.erase_node(node)


@dataclass
class _Use:
    user: Node

    def apply(self, roller: _Roller, results: Sequence[Node]) -> None:
        raise NotImplementedError


@dataclass
class _SingleUse(_Use):
    """A node that reads single steps: the last state, or a value at one step."""

    reads: dict[Node, _AtStep]

    @classmethod
    def plan(cls, roller: _Roller, user: Node) -> _SingleUse:
        return cls(user, {node: _AtStep.plan(roller, node) for node in roller.values_read(user)})

    def apply(self, roller: _Roller, results: Sequence[Node]) -> None:
        for source, read in self.reads.items():
            self.user.replace_input_with(source, read.node(roller, results))


@dataclass(frozen=True)
class _AtStep:
    """The value of one step: the last value of a state, or one of the stacked values; None as ``step`` of a
    state, and -1 if it is the last."""

    result: int
    step: int | None

    @classmethod
    def plan(cls, roller: _Roller, source: Node) -> _AtStep:
        k, j = roller.where[source]
        steps = roller.steps
        state = next((i for i, s in enumerate(roller.states) if s.position == j), None)
        earlier = {node for step in steps[:-1] if (node := step[j]) is not None}
        # What reads one step alike in each may be a loop itself; a list of all steps is not.
        readers = {user for node in earlier for user in _outside(roller.flow, node)}
        joined = [user for user in readers if user.target in those("joins")]
        are_lists = all(len(earlier.intersection(user.all_input_nodes)) > 1 for user in joined)
        only_last = k == len(steps) - 1 and len(joined) == len(readers) and are_lists
        if only_last and state is not None:
            return cls(state, None)
        return cls(roller.value(Inside(j), 0), -1 if only_last else k)

    def node(self, roller: _Roller, results: Sequence[Node]) -> Node:
        result = results[self.result]
        return result if self.step is None else roller.call(ATEN.select.int, result, 0, self.step)


@dataclass(frozen=True)
class _Run:
    """The values at ``position`` of the steps from ``first`` to ``last``."""

    position: int
    first: int
    last: int
    slope: int = 0

    def with_step(self, k: int) -> _Run | None:
        """Return the run with step ``k`` behind it; None if ``k`` does not follow."""
        slope = k - self.last
        return replace(self, last=k, slope=slope) if slope in (1, -1) and self.slope in (0, slope) else None

    def node(self, roller: _Roller, results: Sequence[Node], dim: int) -> Node:
        count = len(roller.steps)
        low, high = min(self.first, self.last), max(self.first, self.last)
        piece = results[roller.value(Inside(self.position), dim)]
        if (low, high) != (0, count - 1):
            end = SLICE_END if high == count - 1 else high + 1
            piece = roller.call(ATEN.slice.Tensor, piece, dim, low, end)
        return roller.call(ATEN.flip.default, piece, [dim]) if self.slope < 0 else piece


@dataclass
class _ListUse(_Use):
    """A stack or cat of the values of steps."""

    dim: int
    entries: list[Node | _AtStep | _Run]

    @classmethod
    def plan(cls, roller: _Roller, user: Node) -> _ListUse:
        listed: Any = user.args[0]
        rank = user.meta["val"].dim()
        dim = int(user.args[1] if len(user.args) > 1 else user.kwargs.get("dim", 0)) % rank  # type: ignore[arg-type]
        entries: list[Node | _Run] = []
        values = roller.values_read(user)
        for node in listed:
            if node not in values:
                entries.append(node)
                continue
            k, j = roller.where[node]
            before = entries[-1] if entries else None
            longer = before.with_step(k) if isinstance(before, _Run) and before.position == j else None
            if longer is None:
                entries.append(_Run(j, k, k))
            else:
                entries[-1] = longer
        planned: list[Node | _AtStep | _Run] = []
        for entry in entries:
            if isinstance(entry, _Run) and not entry.slope:
                source = roller.steps[entry.first][entry.position]
                assert source is not None
                planned.append(_AtStep.plan(roller, source))
                continue
            if isinstance(entry, _Run):
                roller.value(Inside(entry.position), dim)
            planned.append(entry)
        return cls(user, dim, planned)

    def apply(self, roller: _Roller, results: Sequence[Node]) -> None:
        is_cat = self.user.target is ATEN.cat.default
        pieces = []
        for entry in self.entries:
            if isinstance(entry, _Run):
                piece = entry.node(roller, results, self.dim)
                if is_cat:
                    piece = roller.call(ATEN.flatten.using_ints, piece, self.dim, self.dim + 1)
            else:
                piece = entry.node(roller, results) if isinstance(entry, _AtStep) else entry
                if not is_cat:
                    piece = roller.call(ATEN.unsqueeze.default, piece, self.dim)
            pieces.append(piece)
        result = pieces[0] if len(pieces) == 1 else roller.call(ATEN.cat.default, pieces, self.dim)
        result.meta = {**_origin(self.user), "val": result.meta["val"]}
        replace_node(self.user, result)


def _bounds(taken: Taken, count: int) -> tuple[int, int]:
    if taken.slope > 0:
        return taken.start, taken.start + count
    return taken.start - count + 1, taken.start + 1


def _part(taken: Taken) -> Part:
    return Part(taken.dim, taken.slope < 0)


def _origin(node: Node) -> dict[str, Any]:
    """Return the metadata of ``node`` that describe its origin."""
    return {
        key: value
        for key, value in node.meta.items()
        if key not in ("val", "tensor_meta", "unbacked_bindings")
    }
