"""Decide which nodes of a reference graph torch.compile sees as calls of integer kernels.

Integer kernels have packed weights and quantized tensors, and the compiler supports neither. The graph is cut
into levels, by turns floats (even) and kernels (odd): a level reads only lower ones. All kernels of one level
are one region, whose inputs and results are plain tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from torchq_compat.lower.x86.kernels.kernel_base import Floats, KernelCall, Quantized
from torchq_compat.lower.x86.plan import Plan
from torchq_compat.qspecs.qdq import DEQUANTIZES, QUANTIZE

__all__ = ["CHECKS", "Levels", "levels_of"]

ATEN = torch.ops.aten
#: Ops that check values and compute none: torch.fx counts them as impure, but their order does not matter.
CHECKS = frozenset(
    {
        ATEN._assert_tensor_metadata.default,
        ATEN._assert_scalar.default,
        ATEN._assert_async.default,
        ATEN._assert_async.msg,
        ATEN.sym_constrain_range.default,
        ATEN.sym_constrain_range_for_size.default,
    }
)


@dataclass(frozen=True)
class Levels:
    """The level of every node; without levels there are no regions.

    Attributes:
        level_of: node -> its level, in the order of the graph, for all but the free nodes.
        free: nodes that are written wherever they are read: dequantizes, and what is made of weights alone.
        reads: node -> what it reads in a lowered graph: the arguments of its kernel, if it has one.
    """

    level_of: Mapping[Node, int] = field(default_factory=dict)
    free: frozenset[Node] = frozenset()
    reads: Mapping[Node, Sequence[Node]] = field(default_factory=dict)

    def is_in_region(self, node: Node) -> bool:
        """Return whether kernels compute ``node``, which is not free."""
        return self.level_of[node] % 2 == 1

    def regions(self) -> list[list[Node]]:
        """Return the nodes of each region, in the order of the graph."""
        found: dict[int, list[Node]] = {}
        for node, level in self.level_of.items():
            if self.is_in_region(node):
                found.setdefault(level, []).append(node)
        return [found[level] for level in sorted(found)]

    def sources(self, nodes: Iterable[Node]) -> Iterator[Node]:
        """Yield what ``nodes`` read; in place of free nodes what these are made of."""
        for node in nodes:
            for source in self.reads[node]:
                if source in self.free:
                    yield from self.sources([source])
                else:
                    yield source


def levels_of(graph: Graph, plan: Plan) -> Levels:
    """Return the levels of ``graph`` under ``plan``; none if it has effects: levels change the order of
    nodes."""
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output", "call_module")]
    if any(node.is_impure(impure_random=False) and node.target not in CHECKS for node in nodes):
        return Levels()
    levels = Levels(free=frozenset(_free_nodes(graph)), reads=_reads(graph, plan))
    in_kernels = _computed_by_kernels(graph, plan, levels)
    level_of: dict[Node, int] = {}
    for node in graph.nodes:
        if node not in levels.free:
            is_odd = node in in_kernels
            below = [level_of[source] for source in levels.sources([node])]
            level_of[node] = max((level + (level % 2 != is_odd) for level in below), default=int(is_odd))
    # What a kernel computes along the way is not read by others, and has the level of its result.
    for result, call in plan.kernels.items():
        level_of.update({node: level_of[result] for node in call.covers if node in level_of})
    return replace(levels, level_of=level_of)


def _reads(graph: Graph, plan: Plan) -> dict[Node, Sequence[Node]]:
    covered = plan.covered()
    reads = {node: () if node in covered else node.all_input_nodes for node in graph.nodes}
    return {**reads, **{node: tuple(_arguments(call)) for node, call in plan.kernels.items()}}


def _arguments(argument: Any) -> Iterator[Node]:
    if isinstance(argument, KernelCall):
        yield from _arguments(argument.args)
    elif isinstance(argument, (Quantized, Floats)):
        yield argument.node
    elif isinstance(argument, (tuple, list)):
        for each in argument:
            yield from _arguments(each)
    elif isinstance(argument, Node):
        yield argument


def _free_nodes(graph: Graph) -> Iterator[Node]:
    constant: set[Node] = set()
    for node in graph.nodes:
        sources = node.all_input_nodes
        if node.op == "get_attr" or (node.op == "call_function" and sources and constant.issuperset(sources)):
            constant.add(node)
            yield node
        elif node.target in DEQUANTIZES:
            yield node


def _computed_by_kernels(graph: Graph, plan: Plan, levels: Levels) -> set[Node]:
    """Return what kernels compute, and the quantizes and moves of data next to them."""
    moves = {node for node in graph.nodes if node.target is QUANTIZE and node in plan.qparams_of}
    moves = (moves | plan.carried) - levels.free
    found = {node for result, call in plan.kernels.items() for node in (result, *call.covers)} - levels.free
    ordered = [node for node in graph.nodes if node in moves or node in found]
    for node in ordered:
        if node not in found and not found.isdisjoint(levels.sources([node])):
            found.add(node)
    for node in reversed(ordered):
        if node in found:
            found.update(moves.intersection(levels.sources([node])))
    return found
