"""Combines two rolled graphs of one model, captured at two lengths, into one graph of free length.

The graphs have to be equal node by node except for integers that depend on a length, which are replaced by
computations with the sizes of the inputs. Each length grew by a different number, which identifies it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from torchq_compat.capture.loops.roll_graph import RolledGraph
from torchq_compat.capture.loops.step_flow import NotALoopError
from torchq_compat.opaque_calls.capture_stub import OPAQUE_OP
from torchq_compat.support.upstream import pytree

__all__ = ["Length", "follow_lengths"]

ATEN = torch.ops.aten


@dataclass(frozen=True)
class Length:
    """One length that the two captures differ in.

    Attributes:
        placeholder: the index of an input with this length.
        dim: the dimension of that input.
        short: the length in the first capture.
        grown: by how much it is larger in the second; different for each length.
    """

    placeholder: int
    dim: int
    short: int
    grown: int


def follow_lengths(short: RolledGraph, long: RolledGraph, lengths: Sequence[Length]) -> None:
    """Replace the integers of ``short`` that depend on one of ``lengths`` by computations with input sizes.

    Raises:
        NotALoopError: the graphs differ in anything else.
    """
    if [loop.form for loop in short.loops] != [loop.form for loop in long.loops]:
        raise NotALoopError("other loops are found at another length")
    for one, other in zip(short.loops, long.loops, strict=True):
        if differing := list(_differences(one.graph, other.graph)):
            raise NotALoopError(f"a step computes with its number or with the length: {differing[0][0]}")
    graph = short.graph_module.graph
    sizes: dict[Length, Node] = {}
    for node, changes in list(_differences(graph, long.graph_module.graph)):
        leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
        for index, other in changes.items():
            length = _length_of(node, leaves[index], other, lengths)
            leaves[index] = _with_length(graph, node, leaves[index], other, length, sizes)
        node.args, node.kwargs = pytree.tree_unflatten(leaves, spec)


def _differences(one: Graph, other: Graph) -> list[tuple[Node, dict[int, Any]]]:
    """Return the nodes of ``one`` with constants that differ in ``other``, and the constants of ``other`` by
    the index of the leaf."""
    nodes, others = list(one.nodes), list(other.nodes)
    if len(nodes) != len(others):
        raise NotALoopError("the graph has more nodes at another length")
    numbers = {node: index for index, node in enumerate(nodes)}
    other_numbers = {node: index for index, node in enumerate(others)}
    found = []
    for node, twin in zip(nodes, others, strict=True):
        same_target = node.target == twin.target or node.op in ("placeholder", "get_attr", "output")
        if node.op != twin.op or not same_target:
            raise NotALoopError(f"{node} is {twin} at another length")
        leaves, spec = pytree.tree_flatten((_args(node), node.kwargs))
        twins, twin_spec = pytree.tree_flatten((_args(twin), twin.kwargs))
        if spec != twin_spec:
            raise NotALoopError(f"{node} has other arguments at another length")
        changes = {}
        for index, (leaf, twin_leaf) in enumerate(zip(leaves, twins, strict=True)):
            if isinstance(leaf, Node) and isinstance(twin_leaf, Node):
                if numbers[leaf] != other_numbers[twin_leaf]:
                    raise NotALoopError(f"{node} reads something else at another length")
            elif type(leaf) is not type(twin_leaf):
                raise NotALoopError(f"{node} has other arguments at another length")
            elif leaf != twin_leaf:
                changes[index] = twin_leaf
        if changes:
            found.append((node, changes))
    return found


def _args(node: Node) -> Any:
    """Return the arguments to compare, without the layout index of an opaque call, which counts its calls."""
    return node.args[:3] if node.target is OPAQUE_OP else node.args


def _length_of(node: Node, one: Any, other: Any, lengths: Sequence[Length]) -> Length:
    found = None
    if isinstance(one, int) and not isinstance(one, bool):
        found = next((length for length in lengths if abs(other - one) == length.grown), None)
    if found is None:
        raise NotALoopError(f"{node} computes with a length: {one} becomes {other}")
    return found


def _with_length(
    graph: Graph, node: Node, one: int, other: int, length: Length, sizes: dict[Length, Node]
) -> Node:
    slope = 1 if other > one else -1
    if length not in sizes:
        placeholders = graph.find_nodes(op="placeholder")
        with graph.inserting_after(placeholders[-1]):
            place = (placeholders[length.placeholder], length.dim)
            sizes[length] = graph.call_function(ATEN.sym_size.int, place)
    with graph.inserting_before(node):
        made = sizes[length]
        if slope < 0:
            made = graph.call_function(operator.neg, (made,))
        offset = one - slope * length.short
        return graph.call_function(operator.add, (made, offset)) if offset else made
