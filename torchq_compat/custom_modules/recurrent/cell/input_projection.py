"""Splits a cell's graph into the input projection, computed for all steps at once, and the step itself.

The split is exact, because static qparams do not depend on the step. Ops that choose their qparams from their
input stay in the step, and so do ops that depend on the number of dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from torchq_compat.qspecs.qdq import DEQUANTIZE, QUANTIZE

__all__ = ["CellFunctions", "SplitGraph", "call_on", "split_off_constants", "split_off_projection"]

Function = Callable[..., tuple[Tensor, ...]]
#: A module, or its attributes by path.
Owner = GraphModule | dict[str, Any]

#: Ops that compute the same for every leading size, and with one more leading dimension.
RANK_AGNOSTIC = (
    torch.ops.aten.linear.default,
    torch.ops.aten.to.dtype,
    QUANTIZE,
    DEQUANTIZE,
)


class SplitGraph(NamedTuple):
    """A graph split in two. The inputs of ``rest`` are the results of ``first``, then the inputs that
    ``first`` does not have."""

    first: Graph
    rest: Graph


def split_off_projection(cell: Graph) -> SplitGraph:
    """Return ``cell``, (x, *states) -> new states, as x -> projected and (*projected, *states) -> new states.

    The first graph has the nodes that depend on no input but x, as long as they work for any leading
    dimensions. Weights that both graphs read are in both.
    """
    x = next(node for node in cell.nodes if node.op == "placeholder")
    constants = _constants(cell)
    moved = {x}
    for node in cell.nodes:
        inputs = set(node.all_input_nodes)
        if node.target in RANK_AGNOSTIC and inputs & moved and inputs <= moved | constants:
            moved.add(node)
    return _split(cell, moved, constants)


def split_off_constants(step: Graph) -> SplitGraph:
    """Return ``step`` split into () -> constants, such as dequantized weights, and (*constants, *inputs) ->
    results."""
    constants = _constants(step)
    return _split(step, constants, set())


def call_on(owner: Owner, graph: Graph) -> Function:
    """Return ``graph``, whose attributes are those of ``owner``, as a function of an owner and the graph's
    inputs. The function is not bound to ``owner``, so that a copy of ``owner`` can use it too."""
    forward: Function = type(GraphModule(owner, graph)).forward
    return forward


@dataclass(frozen=True)
class CellFunctions:
    """A cell split in two, as functions of the owner of its weights and their inputs.

    Attributes:
        graphs: the projection and the step.
        project: (owner, x) -> projected.
        step: (owner, *projected, *states) -> the new states.
        constants: (owner) -> the values that the step computes only from weights.
        step_of_constants: (owner, *constants, *projected, *states) -> the new states.
        weights: (owner) -> the weights of the step, as they are stored.
        step_of_weights: (owner, *weights, *projected, *states) -> the new states.
    """

    graphs: SplitGraph
    project: Function
    step: Function
    constants: Function
    step_of_constants: Function
    weights: Function
    step_of_weights: Function

    @classmethod
    def of(cls, owner: Owner, cell: Graph) -> Self:
        """Return the functions of ``cell``, whose attributes are those of ``owner``."""
        graphs = split_off_projection(cell)
        stored = {node for node in graphs.rest.nodes if node.op == "get_attr"}
        splits = (graphs, split_off_constants(graphs.rest), _split(graphs.rest, stored, set()))
        return cls(graphs, *(call_on(owner, graph) for split in splits for graph in split))


def _constants(graph: Graph) -> set[Node]:
    """Return the nodes of the weights, and those computed only from weights."""
    constants: set[Node] = set()
    for node in graph.nodes:
        computed = node.op == "call_function" and node.all_input_nodes
        if node.op == "get_attr" or (computed and constants.issuperset(node.all_input_nodes)):
            constants.add(node)
    return constants


def _split(graph: Graph, moved: set[Node], shared: set[Node]) -> SplitGraph:
    """Return a graph of the ``moved`` nodes and one of the rest; each has the ``shared`` nodes it reads."""
    handed_over = [node for node in graph.nodes if node in moved and not moved.issuperset(node.users)]
    first, in_first = Graph(), dict[Node, Node]()
    for node in _with_what_they_read(moved, shared, graph):
        in_first[node] = first.node_copy(node, in_first.__getitem__)
    first.output(tuple(in_first[node] for node in handed_over))
    rest, in_rest = Graph(), dict[Node, Node]()
    for node in handed_over:
        in_rest[node] = rest.placeholder(node.name)
        in_rest[node].meta = dict(node.meta)
    others = [node for node in graph.nodes if node not in moved and node not in shared]
    for node in _with_what_they_read(others, shared, graph):
        in_rest[node] = rest.node_copy(node, in_rest.__getitem__)
    return SplitGraph(first, rest)


def _with_what_they_read(nodes: Collection[Node], shared: set[Node], graph: Graph) -> Iterator[Node]:
    """Return ``nodes`` and the nodes of ``shared`` that they depend on, in the order of ``graph``."""
    wanted = set(nodes)
    for node in reversed(graph.nodes):
        if node in wanted:
            wanted |= shared.intersection(node.all_input_nodes)
    return (node for node in graph.nodes if node in wanted)
