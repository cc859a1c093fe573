"""A cell's graph in two: the input projection, which all time steps can have at once, and the step itself.

Exact, because static qparams do not depend on the step. What chooses its qparams from its input stays in the
step, and so does what depends on the number of dimensions.
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
#: A module, or its attributes by their paths.
Owner = GraphModule | dict[str, Any]

#: They compute the same for every leading size, and for one more dimension in front.
RANK_AGNOSTIC = (
    torch.ops.aten.linear.default,
    torch.ops.aten.to.dtype,
    QUANTIZE,
    DEQUANTIZE,
)


class SplitGraph(NamedTuple):
    """A graph in two. ``rest`` takes what ``first`` returns, then the inputs ``first`` does not take."""

    first: Graph
    rest: Graph


def split_off_projection(cell: Graph) -> SplitGraph:
    """Return ``cell``, (x, *states) -> new states, as x -> projected and (*projected, *states) -> new states.

    Moved is what depends on x, of the inputs, alone, as long as it is indifferent to leading dimensions. The
    weights it reads are read in the first graph, and in the second where that reads them too.
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
    """Return ``step`` as () -> constants, such as dequantized weights, and (*constants, *inputs) ->
    results."""
    constants = _constants(step)
    return _split(step, constants, set())


def call_on(owner: Owner, graph: Graph) -> Function:
    """Return ``graph``, whose attributes are those of ``owner``, as a function of an owner and its inputs. It
    is not bound to ``owner``: a copy of that may keep it."""
    forward: Function = type(GraphModule(owner, graph)).forward
    return forward


@dataclass(frozen=True)
class CellFunctions:
    """A cell in two, as functions of whatever owns its weights and their inputs.

    Attributes:
        graphs: the projection and the step.
        project: (owner, x) -> projected.
        step: (owner, *projected, *states) -> the new states.
        constants: (owner) -> what the step computes of weights alone.
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
        """Of ``cell``, whose attributes are those of ``owner``."""
        graphs = split_off_projection(cell)
        stored = {node for node in graphs.rest.nodes if node.op == "get_attr"}
        splits = (graphs, split_off_constants(graphs.rest), _split(graphs.rest, stored, set()))
        return cls(graphs, *(call_on(owner, graph) for split in splits for graph in split))


def _constants(graph: Graph) -> set[Node]:
    """Weights and what is computed of them alone."""
    constants: set[Node] = set()
    for node in graph.nodes:
        computed = node.op == "call_function" and node.all_input_nodes
        if node.op == "get_attr" or (computed and constants.issuperset(node.all_input_nodes)):
            constants.add(node)
    return constants


def _split(graph: Graph, moved: set[Node], shared: set[Node]) -> SplitGraph:
    """Return ``moved`` in the first graph, the others in the rest; of ``shared`` each has what it reads."""
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
    """Return ``nodes`` and those of ``shared`` they depend on, in the order of ``graph``."""
    wanted = set(nodes)
    for node in reversed(graph.nodes):
        if node in wanted:
            wanted |= shared.intersection(node.all_input_nodes)
    return (node for node in graph.nodes if node in wanted)
