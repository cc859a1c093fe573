"""The graph of a lowered model that torch.compile sees: one operator for each region of integer kernels."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from torchq_compat.lower.x86.compiled.region_operator import REGION_OPERATOR
from torchq_compat.lower.x86.compiled.regions import Levels, levels_of
from torchq_compat.lower.x86.direct_code import direct_forward
from torchq_compat.lower.x86.lowered_parts import MADE, share_state
from torchq_compat.lower.x86.lowering_pass import write_lowered_region
from torchq_compat.lower.x86.plan import Plan
from torchq_compat.lower.x86.qdq_operands import SCALARS, example_value
from torchq_compat.support.graph_nodes import attribute_of

__all__ = ["KernelRegion", "compiled_graph"]


class KernelRegion:
    """A region of integer kernels.

    Args:
        nodes: see ``write_lowered_region``.
        tensors: the tensors it reads.
        sizes: the sizes it reads.
        outputs: the tensors that others read of it.
    """

    def __init__(
        self,
        reference: GraphModule,
        plan: Plan,
        nodes: Sequence[Node],
        tensors: Sequence[Node],
        sizes: Sequence[Node],
        outputs: Sequence[Node],
    ) -> None:
        self.reference = reference
        self.tensors = tensors
        self.sizes = sizes
        self.outputs = outputs
        written = write_lowered_region(nodes, plan, (*tensors, *sizes), outputs, MADE)
        module = nn.Module()
        share_state(module, reference)
        vars(module)[MADE] = _Constants(written.constants)
        self.kernels: Callable[..., list[Tensor]] = partial(
            direct_forward(written.graph.python_code("self"), written.graph), module
        )
        self.digest = _digest(reference, nodes)

    def run(self, tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """See ``region_operator.Region``."""
        results: list[Tensor] = []
        for result in self.kernels(*tensors, *sizes):
            # Convolution kernels return channels-last tensors, whatever ``shapes`` told the compiler.
            plain = result.contiguous()
            shares = any(plain.data_ptr() == other.data_ptr() for other in (*results, *tensors))
            results.append(plain.clone() if shares else plain)
        return results

    def shapes(self, tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """See ``region_operator.Region``."""
        values: dict[Node, Any] = dict(zip((*self.tensors, *self.sizes), (*tensors, *sizes), strict=True))
        for node in _between(self.reference.graph, set(values), self.outputs):
            if node.op == "get_attr":
                attribute = attribute_of(self.reference, node)
                values[node] = torch.empty(attribute.shape, dtype=attribute.dtype)
            else:
                assert callable(node.target)
                args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
        return [values[node].contiguous() for node in self.outputs]


class _Constants:
    def __init__(self, constants: dict[str, Any]) -> None:
        vars(self).update(constants)


def compiled_graph(
    reference: GraphModule, plan: Plan, owner: int
) -> tuple[GraphModule | None, tuple[KernelRegion, ...]]:
    """Return the graph that torch.compile sees, and its regions; None if it sees the reference graph.

    Args:
        owner: the number of the model in calls of ``REGION_OPERATOR``.
    """
    levels = levels_of(reference.graph, plan)
    regions = tuple(_regions(reference, plan, levels))
    if not regions or not all(map(_takes_and_returns_tensors, regions)):
        return None, ()
    module = GraphModule(nn.Module(), Graph())
    share_state(module, reference)
    module.graph = _outer_graph(reference.graph, levels, regions, owner)
    return module, regions


def _regions(reference: GraphModule, plan: Plan, levels: Levels) -> Iterator[KernelRegion]:
    order = {node: index for index, node in enumerate(reference.graph.nodes)}
    for members in levels.regions():
        inside = set(members)
        inputs = [source for source in dict.fromkeys(levels.sources(members)) if source not in inside]
        sizes = [source for source in inputs if isinstance(example_value(source), SCALARS)]
        tensors = [source for source in inputs if source not in sizes]
        nodes = sorted(inside | set(_free_behind(members, levels)), key=order.__getitem__)
        outputs = [node for node in members if _is_read_outside(node, inside, levels)]
        if outputs:
            yield KernelRegion(reference, plan, nodes, tensors, sizes, outputs)


def _free_behind(nodes: Iterable[Node], levels: Levels) -> Iterator[Node]:
    for node in nodes:
        free = [source for source in levels.reads[node] if source in levels.free]
        yield from free
        yield from _free_behind(free, levels)


def _is_read_outside(node: Node, inside: set[Node], levels: Levels) -> bool:
    return any(
        _is_read_outside(user, inside, levels) if user in levels.free else user not in inside
        for user in node.users
    )


def _between(graph: Graph, inputs: Container[Node], outputs: Iterable[Node]) -> list[Node]:
    """Return the nodes from which ``outputs`` are computed, given ``inputs``, in the order of ``graph``."""
    found, waiting = set(), list(outputs)
    while waiting:
        node = waiting.pop()
        if node not in found and node not in inputs:
            found.add(node)
            waiting += node.all_input_nodes
    return [node for node in graph.nodes if node in found]


def _takes_and_returns_tensors(region: KernelRegion) -> bool:
    """Return whether the operator's schema fits: torch.compile has operators on tensors and integers."""
    sizes = (isinstance(example_value(node), (int, torch.SymInt)) for node in region.sizes)
    return (
        bool(region.tensors)
        and all(sizes)
        and all(isinstance(example_value(node), Tensor) for node in region.outputs)
    )


def _digest(reference: GraphModule, nodes: Sequence[Node]) -> str:
    told = [
        f"{node.format_node()} {attribute_of(reference, node).shape if node.op == 'get_attr' else ''}"
        for node in nodes
    ]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()


def _outer_graph(graph: Graph, levels: Levels, regions: Sequence[KernelRegion], owner: int) -> Graph:
    outer, copies = Graph(), {}

    def copy_of(node: Node) -> Node:
        if node not in copies:
            copies[node] = outer.node_copy(node, copy_of)
        return copies[node]

    level_of = levels.level_of
    called = {level_of[region.outputs[0]]: (index, region) for index, region in enumerate(regions)}
    *nodes, output = graph.nodes
    # Lower levels first, in the order of the graph within each.
    for node in sorted((node for node in nodes if node in level_of), key=level_of.__getitem__):
        if level_of[node] not in called:
            copy_of(node)
        elif node not in copies and node in called[level_of[node]][1].outputs:
            index, region = called[level_of[node]]
            args = (
                [*map(copy_of, region.tensors)],
                [*map(copy_of, region.sizes)],
                owner,
                index,
                region.digest,
            )
            results = outer.call_function(REGION_OPERATOR, args)
            for position, each in enumerate(region.outputs):
                copies[each] = outer.call_function(operator.getitem, (results, position))
                copies[each].meta = dict(each.meta)
    copy_of(output)
    outer.set_codegen(graph._codegen)
    outer.eliminate_dead_code(lambda node: node.op in ("call_module", "placeholder", "output"))
    return outer
