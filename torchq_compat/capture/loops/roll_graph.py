"""Rolls the loops of an unrolled graph, in place: each becomes one call of a ``Loop``."""

import functools
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from torchq_compat.capture.loops.loop_module import LoopForm, Part
from torchq_compat.capture.loops.segments import (
    WITH_NUMBER,
    candidates,
    compared_arguments,
    computes_number,
    leaves_of,
    tidy_graph,
)
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
from torchq_compat.capture.opaque_stub import StubRegistry
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
    """

    name: str
    graph: Graph
    form: LoopForm


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
    flows, known = list[Flow](), functools.cache(leaves_of)
    for steps in candidates(graph_module, stubs):
        try:
            flow = flow_of(steps, known)
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
    return [user for user in node.users if user not in flow.nodes]


@dataclass
class _Roller:
    graph_module: GraphModule
    flow: Flow
    name: str
    #: What is stacked of all steps, and the dimension -> the result of the loop.
    stacked: dict[tuple[Read, int], Node] = field(default_factory=dict)

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
        self.in_lists = {position for position in range(len(self.steps[0])) if self._is_in_lists(position)}
        users = self._users()
        taken = [position for position in flow.taken if flow.is_read_inside(position)]
        same = self._same()
        last = max(
            (node for step in self.steps for node in step if node is not None), key=self.order.__getitem__
        )
        with graph.inserting_after(last):
            self.anchor = graph.call_function(operator.add, (0, 0))
        with graph.inserting_before(self.anchor):
            wholes = self._wholes([flow.taken[position] for position in taken])
            for number in flow.counted:
                end = number.start + number.slope * len(self.steps)
                wholes.append(self.call(ATEN.arange.start_step, number.start, end, number.slope))
            if not wholes:
                wholes = [self.call(ATEN.arange.default, len(self.steps))]
            self.graph_module.add_module(self.name, nn.Identity())
            self.loop = graph.call_module(self.name, ([s.first for s in self.states], wholes, list(same)))
        self.last = [self._result(i, state.first.meta["val"]) for i, state in enumerate(self.states)]
        for user in users:
            with graph.inserting_before(user):
                self._read_results(user)
        with graph.inserting_before(self.anchor):
            self._write_results()
        graph.erase_node(self.anchor)
        parts = [Part(flow.taken[p].dim, flow.taken[p].slope < 0) for p in taken]
        form = LoopForm(
            len(self.states),
            (*parts, *[Part(0)] * len(flow.counted)) or (Part(0),),
            tuple(dim for _, dim in self.stacked),
            counted=not taken and not flow.counted,
        )
        body = self._body(taken, same)
        self._erase()
        return RolledLoop(self.name, body, form)

    def call(self, target: Any, *args: Any) -> Node:
        """Insert a call of ``target`` at the graph's insertion point."""
        node = self.graph_module.graph.call_function(target, args)
        values = pytree.tree_map(lambda leaf: leaf.meta["val"] if isinstance(leaf, Node) else leaf, args)
        node.meta["val"] = target(*values)
        return node

    def _keep_invariants(self) -> None:
        for position in self.flow.invariant:
            kept = self.steps[0][position]
            assert kept is not None
            for step in self.steps[1:]:
                if (node := step[position]) is not None:
                    node.replace_all_uses_with(kept)

    def _result(self, index: int, value: Tensor) -> Node:
        with self.graph_module.graph.inserting_before(self.anchor):
            result = self.graph_module.graph.call_function(operator.getitem, (self.loop, index))
        result.meta["val"] = value
        return result

    def stack(self, read: Read, dim: int) -> Node:
        """Return the result that stacks ``read`` of all steps along ``dim``."""
        if (read, dim) not in self.stacked:
            assert isinstance(read, (Inside, Carried))
            values = [self.flow.template[read.position].meta["val"]] * len(self.steps)
            index = len(self.states) + len(self.stacked)
            self.stacked[read, dim] = self._result(index, torch.stack(values, dim))
        return self.stacked[read, dim]

    def values_read(self, user: Node) -> list[Node]:
        """Return the nodes of steps, other than parts and invariants, that ``user`` reads."""
        kept = {*self.flow.invariant, *self.flow.taken}
        return [
            node for node in user.all_input_nodes if node in self.where and self.where[node][1] not in kept
        ]

    def _users(self) -> list[Node]:
        """Return the nodes behind the loop that read nodes of steps."""
        users: dict[Node, None] = {}
        for step in self.steps:
            for position, node in enumerate(step):
                if node is not None and position not in {*self.flow.invariant, *self.flow.taken}:
                    users.update(dict.fromkeys(_outside(self.flow, node)))
        return sorted(users, key=self.order.__getitem__)

    def _is_in_lists(self, position: int) -> bool:
        """Return whether the values at ``position``, but that of the last step, are read in lists of them
        only: what reads one step alike in each may be a loop itself."""
        earlier = {node for step in self.steps[:-1] if (node := step[position]) is not None}
        readers = {user for node in earlier for user in _outside(self.flow, node)}
        return all(
            user.target in those("joins") and len(earlier.intersection(user.all_input_nodes)) > 1
            for user in readers
        )

    def _read_results(self, user: Node) -> None:
        """Let ``user``, a node behind the loop, read results in place of nodes of steps: it joins the values
        of steps, or reads the last state or a value at one step."""
        values = self.values_read(user)
        if user.target not in those("joins"):
            for source in values:
                user.replace_input_with(source, self._at_step(source))
            return
        listed: Any = user.args[0]
        rank, is_cat = user.meta["val"].dim(), user.target is ATEN.cat.default
        dim = int(user.args[1] if len(user.args) > 1 else user.kwargs.get("dim", 0)) % rank  # type: ignore[arg-type]
        runs: list[list[Node]] = []
        for node in listed:
            if runs and node in values and runs[-1][-1] in values and self._follows(runs[-1], node):
                runs[-1].append(node)
            else:
                runs.append([node])
        pieces = []
        for run in runs:
            if len(run) > 1:
                piece = self._stacked_run(run, dim)
                piece = self.call(ATEN.flatten.using_ints, piece, dim, dim + 1) if is_cat else piece
            else:
                piece = self._at_step(run[0]) if run[0] in values else run[0]
                piece = piece if is_cat else self.call(ATEN.unsqueeze.default, piece, dim)
            pieces.append(piece)
        result = pieces[0] if len(pieces) == 1 else self.call(ATEN.cat.default, pieces, dim)
        result.meta = {**_origin(user), "val": result.meta["val"]}
        replace_node(user, result)

    def _follows(self, run: Sequence[Node], node: Node) -> bool:
        """Return whether ``node`` is the value of the next step, or of the one before, as in the ``run``."""
        (k, j), (last, position) = self.where[node], self.where[run[-1]]
        slopes = {k - last, *(last - self.where[before][0] for before in run[-2:-1])}
        return j == position and slopes in ({1}, {-1})

    def _stacked_run(self, run: Sequence[Node], dim: int) -> Node:
        (first, position), (last, _) = self.where[run[0]], self.where[run[-1]]
        low, high, count = min(first, last), max(first, last), len(self.steps)
        piece = self.stack(Inside(position), dim)
        if (low, high) != (0, count - 1):
            end = SLICE_END if high == count - 1 else high + 1
            piece = self.call(ATEN.slice.Tensor, piece, dim, low, end)
        return self.call(ATEN.flip.default, piece, [dim]) if last < first else piece

    def _at_step(self, source: Node) -> Node:
        """Return the value of ``source``, a node of one step, behind the loop."""
        k, position = self.where[source]
        is_last = k == len(self.steps) - 1 and position in self.in_lists
        state = next((i for i, s in enumerate(self.states) if s.position == position), None)
        if is_last and state is not None:
            return self.last[state]
        return self.call(ATEN.select.int, self.stack(Inside(position), 0), 0, -1 if is_last else k)

    def _write_results(self) -> None:
        count, current = len(self.steps), dict[Node, Node]()
        for write in self.flow.written.values():
            place = write.place
            whole = self.stack(write.value, place.dim)
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
            if (outer := self._outer(read)) is not None:
                return outside(outer)
            return result[read] if isinstance(read, (Inside, Carried, Counted)) else read

        for position in self.flow.body:
            node = self.flow.template[position]
            leaves = iter([value(read) for read in self.flow.reads[position]])
            compared = compared_arguments(node)
            args, kwargs = pytree.tree_map(lambda _leaf: next(leaves), compared)  # noqa: B023
            args = (*args, *node.args[len(args) :])
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


def _bounds(taken: Taken, count: int) -> tuple[int, int]:
    if taken.slope > 0:
        return taken.start, taken.start + count
    return taken.start - count + 1, taken.start + 1


def _origin(node: Node) -> dict[str, Any]:
    """Return the metadata of ``node`` that describe its origin."""
    return {
        key: value
        for key, value in node.meta.items()
        if key not in ("val", "tensor_meta", "unbacked_bindings")
    }
