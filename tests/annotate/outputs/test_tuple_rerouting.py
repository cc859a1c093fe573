"""reroute_tuples: the same results, no known structure indexed, and nothing to do in a second run."""

from __future__ import annotations

import operator
import random
from collections import namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Interpreter, Node, symbolic_trace

from torchq_compat import reroute_tuples

Pair = namedtuple("Pair", ["first", "second"])
INPUTS = (3, 5, (7, (11, 13)))


def run(graph: Graph) -> Any:
    return Interpreter(nn.Module(), graph=graph).run(*INPUTS)


def structure_getitems(graph: Graph) -> list[Node]:
    """Return the getitems whose container is written in the graph: in their arguments, or built by a call."""
    builders = (tuple, list, dict, Pair)
    return [
        node
        for node in graph.nodes
        if node.target is operator.getitem
        and (not isinstance(node.args[0], Node) or node.args[0].target in builders)
    ]


def builders(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.target in (tuple, list, dict, Pair)]


class GraphWriter:
    """Writes a random graph.

    A value is a pair of its argument and its structure: None for an opaque value, a container of values for a
    known structure."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.graph = Graph()
        a, b, opaque = (self.graph.placeholder(name) for name in ("a", "b", "opaque"))
        self.scalars: list[Any] = [a, b, self.graph.call_function(operator.getitem, (opaque, 0))]
        pair = self.graph.call_function(operator.getitem, (opaque, 1))
        self.scalars.append(self.graph.call_function(operator.getitem, (pair, -1)))
        #: (argument, [elements as (argument, shape)]); the shape of a scalar is None.
        self.structures: list[tuple[Any, Any]] = []

    def step(self) -> None:
        kind = self.dice.choice(["build", "build", "index", "index", "index", "slice", "compute"])
        if kind == "compute" or (kind in ("index", "slice") and not self.structures):
            self.scalars.append(
                self.graph.call_function(operator.add, (self.any_scalar(), self.any_scalar()))
            )
        elif kind == "build":
            self.build()
        else:
            self.access(kind)

    def any_scalar(self) -> Any:
        return self.dice.choice([*self.scalars, 17])

    def any_value(self) -> tuple[Any, Any]:
        if self.structures and self.dice.random() < 0.5:
            return self.dice.choice(self.structures)
        return self.any_scalar(), None

    def build(self) -> None:
        items = [self.any_value() for _ in range(self.dice.randint(1, 3))]
        arguments = [argument for argument, _ in items]
        kind = self.dice.choice(["tuple", "list", "dict", "kwargs", "pair", "literal", "copy"])
        keys = ["x", "y", "z"][: len(items)]
        shape: Any = dict(zip(keys, items, strict=True)) if kind in ("dict", "kwargs") else items
        if kind == "literal":
            argument: Any = tuple(arguments)
        elif kind == "pair":
            shape = [items[0], items[-1]]
            argument = self.graph.call_function(Pair, (arguments[0], arguments[-1]))
        elif kind == "kwargs":
            argument = self.graph.call_function(dict, (), dict(zip(keys, arguments, strict=True)))
        elif kind == "dict":
            argument = self.graph.call_function(dict, (dict(zip(keys, arguments, strict=True)),))
        else:
            argument = self.graph.call_function(tuple if kind == "tuple" else list, (arguments,))
            if kind == "copy":
                argument = self.graph.call_function(tuple, (argument,))
        self.structures.append((argument, shape))

    def access(self, kind: str) -> None:
        argument, shape = self.dice.choice(self.structures)
        if isinstance(shape, dict):
            key = self.dice.choice(sorted(shape))
            self.keep(self.graph.call_function(operator.getitem, (argument, key)), shape[key][1])
        elif kind == "slice":
            bounds = [None, None, *range(-len(shape), len(shape) + 1)]
            cut = slice(*map(self.dice.choice, (bounds, bounds, [None, 1, -1, 2])))
            self.structures.append(
                (self.graph.call_function(operator.getitem, (argument, cut)), shape[cut])
            ) if shape[cut] else None
        else:
            index = self.dice.randrange(-len(shape), len(shape))
            self.keep(self.graph.call_function(operator.getitem, (argument, index)), shape[index][1])

    def keep(self, node: Node, shape: Any) -> None:
        if shape is None:
            self.scalars.append(node)
        else:
            self.structures.append((node, shape))

    def finish(self) -> Graph:
        results = [self.any_value()[0] for _ in range(self.dice.randint(1, 3))]
        self.graph.output((*results, *self.scalars))
        self.graph.lint()
        return self.graph


def random_graph(steps: int, seed: int) -> Graph:
    writer = GraphWriter(random.Random(seed))
    for _ in range(steps):
        writer.step()
    return writer.finish()


@settings(max_examples=300, deadline=None)
@given(st.builds(random_graph, st.integers(1, 14), st.integers(0, 2**32)))
def test_same_results_no_structure_left_and_idempotent(graph: Graph) -> None:
    expected = run(graph)
    opaque_getitems = 3
    reroute_tuples(graph)
    graph.lint()
    assert run(graph) == expected
    assert structure_getitems(graph) == []
    assert sum(n.target is operator.getitem for n in graph.nodes) == opaque_getitems
    assert all(node.users for node in builders(graph))
    assert reroute_tuples(graph) == 0
    compiled = GraphModule(nn.Module(), graph)
    assert compiled(*INPUTS) == expected


def test_backtracking_where_fx_gives_another_tensor() -> None:
    """fx-semantics B1: ``r[1][0]`` and ``r[1][1]`` through two ``r[1]``, and ``o[1][0] + o[1][0]``."""

    def forward(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        r = (a, (b, c))
        return r[1][0] - r[1][1] + (r[1][0] + r[1][0])

    graph = Graph()
    a, b, c = (graph.placeholder(name) for name in "abc")
    inner = graph.call_function(tuple, ([b, c],))
    outer = graph.call_function(tuple, ([a, inner],))
    picked = []
    for index in (0, 1, 0, 0):
        first = graph.call_function(operator.getitem, (outer, 1))
        picked.append(graph.call_function(operator.getitem, (first, index)))
    difference = graph.call_function(operator.sub, (picked[0], picked[1]))
    double = graph.call_function(operator.add, (picked[2], picked[3]))
    graph.output(graph.call_function(operator.add, (difference, double)))

    inputs = (torch.tensor(1.0), torch.tensor(20.0), torch.tensor(300.0))
    assert reroute_tuples(graph) == 10
    assert [node.op for node in graph.nodes].count("call_function") == 3
    assert difference.args == (b, c)
    assert torch.equal(GraphModule(nn.Module(), graph)(*inputs), forward(*inputs))


def test_the_nested_result_of_an_lstm() -> None:
    """The structure that FX rebuilds behind a custom-module LSTM, used whole, by part and by slice."""
    graph = Graph()
    lstm = graph.placeholder("lstm")
    parts = [graph.call_function(operator.getitem, (lstm, i)) for i in range(3)]
    rebuilt = graph.call_function(tuple, ([parts[0], graph.call_function(tuple, ([parts[1], parts[2]],))],))
    state = graph.call_function(operator.getitem, (rebuilt, slice(1, None)))
    c_n = graph.call_function(
        operator.getitem, (graph.call_function(operator.getitem, (state, -1)), slice(-1, None))
    )
    graph.output((rebuilt, graph.call_function(operator.getitem, (c_n, 0))))
    reroute_tuples(graph)
    assert graph.output_node().args[0] == (rebuilt, parts[2])
    assert GraphModule(nn.Module(), graph)((1, 2, 3)) == ((1, (2, 3)), 3)


def test_structures_written_into_the_users_arguments() -> None:
    graph = Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    nested = graph.call_function(tuple, ([(a, b), 4],))
    pair = graph.call_function(operator.getitem, (nested, 0))
    graph.output(graph.call_function(max, (pair,)))
    assert reroute_tuples(graph) == 2
    assert GraphModule(nn.Module(), graph)(2, 9) == 9


def test_a_field_of_a_named_tuple() -> None:
    graph = Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    pair = graph.call_function(Pair, (a, (b, 4)))
    second = graph.call_function(getattr, (pair, "second"))
    graph.output(graph.call_function(operator.getitem, (second, 0)))
    assert reroute_tuples(graph) == 3
    assert GraphModule(nn.Module(), graph)(2, 9) == 9


def test_unused_builders_go_and_used_ones_stay() -> None:
    graph = Graph()
    a = graph.placeholder("a")
    inner = graph.call_function(list, ([a],))
    graph.call_function(dict, ({"x": inner},))
    kept = graph.call_function(tuple, ([a, 2],))
    graph.output(kept)
    assert reroute_tuples(graph) == 2
    assert builders(graph) == [kept]


def left_alone(build: Any) -> Graph:
    graph = Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    graph.output(build(graph, a, b))
    before = str(graph)
    assert reroute_tuples(graph) == 0
    assert str(graph) == before
    return graph


def test_computed_index_is_left() -> None:
    graph = left_alone(lambda g, a, b: g.call_function(operator.getitem, ((a, b), b)))
    assert GraphModule(nn.Module(), graph)(7, 0) == 7
    graph = left_alone(lambda g, a, b: g.call_function(operator.getitem, ((a, b), slice(b, None))))
    assert GraphModule(nn.Module(), graph)(7, 1) == (1,)


def test_index_out_of_range_raises_what_it_raised() -> None:
    graph = left_alone(lambda g, a, b: g.call_function(operator.getitem, ((a, b), 2)))
    with pytest.raises(IndexError):
        run_two(graph)
    graph = left_alone(lambda g, a, b: g.call_function(operator.getitem, ({"x": a}, "y")))
    with pytest.raises(KeyError):
        run_two(graph)


def run_two(graph: Graph) -> Any:
    return GraphModule(nn.Module(), graph)(1, 2)


def test_a_list_that_is_written_to_is_left() -> None:
    def append(g: Graph, a: Node, b: Node) -> Node:
        values = g.call_function(list, ([a],))
        g.call_method("append", (values, b))
        return g.call_function(operator.getitem, (values, -1))

    def setitem(g: Graph, a: Node, b: Node) -> Node:
        values = g.call_function(list, ([a],))
        g.call_function(operator.setitem, (values, 0, b))
        return g.call_function(operator.getitem, (values, 0))

    assert run_two(left_alone(append)) == 2
    assert run_two(left_alone(setitem)) == 2


def test_an_opaque_container_is_left() -> None:
    left_alone(lambda g, a, b: g.call_function(operator.getitem, (a, 0)))
    left_alone(lambda g, a, b: g.call_function(getattr, (g.call_function(tuple, ([a],)), "index")))
    left_alone(lambda g, a, b: g.call_function(operator.getitem, (g.call_function(tuple, (a,)), 0)))


def test_on_a_traced_module() -> None:
    class Shuffle(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
            chunks = torch.chunk(x, 2)
            return {"sum": chunks[0] + y, "rest": [chunks[1], (y,)]}

    traced = symbolic_trace(Shuffle())
    inputs = torch.arange(4.0), torch.ones(2)
    expected = traced(*inputs)
    assert reroute_tuples(traced.graph) == 0
    traced.recompile()
    assert torch.equal(traced(*inputs)["sum"], expected["sum"])
