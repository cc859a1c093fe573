"""The graph of a lowered model that torch.compile sees: one operator for each region of integer kernels."""

from __future__ import annotations

import hashlib
import operator
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from torchq_compat.lower.x86.compiled.layouts import Layout, images, layout_of
from torchq_compat.lower.x86.compiled.region_operator import REGION_OPERATOR, RegionTable
from torchq_compat.lower.x86.compiled.regions import CHECKS, Levels, levels_of
from torchq_compat.lower.x86.direct_code import direct_forward
from torchq_compat.lower.x86.lowered_parts import MADE, share_state
from torchq_compat.lower.x86.lowering_pass import COPYING, write_lowered_region
from torchq_compat.lower.x86.plan import Plan
from torchq_compat.lower.x86.qdq_operands import SCALARS, example_value
from torchq_compat.support.graph_nodes import attribute_of

__all__ = ["KernelRegion", "compiled_graph"]


class KernelRegion:
    """A region of integer kernels.

    Args:
        members: the nodes of its level.
        nodes: see ``write_lowered_region``.
        tensors: the tensors it reads.
        sizes: the sizes it reads.
        outputs: the tensors that others read of it.
        layouts: the layout of each output.
        is_first: whether all other regions of the same graph read what this one computes.
    """

    def __init__(
        self,
        reference: GraphModule,
        plan: Plan,
        members: Container[Node],
        nodes: Sequence[Node],
        tensors: Sequence[Node],
        sizes: Sequence[Node],
        outputs: Sequence[Node],
        layouts: Sequence[Layout],
        *,
        is_first: bool,
    ) -> None:
        self.reference = reference
        self.members = members
        self.tensors = tensors
        self.sizes = sizes
        self.outputs = outputs
        self.layouts = layouts
        self.is_first = is_first
        written = write_lowered_region(nodes, plan, (*tensors, *sizes), outputs, MADE)
        module = nn.Module()
        share_state(module, reference)
        vars(module)[MADE] = SimpleNamespace(**written.constants)
        self.kernels: Callable[..., list[Tensor]] = partial(
            direct_forward(written.graph.python_code("self"), written.graph), module
        )
        self.digest = _digest(reference, nodes)

    def run(self, tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """See ``region_operator.Region``."""
        results: list[Tensor] = []
        for result, layout in zip(self.kernels(*tensors, *sizes), self.layouts, strict=True):
            # Kernels choose a layout by their inputs, but the compiler trusts what ``shapes`` told it.
            found = layout(result)
            # The compiler may write into one result while it reads another.
            shares = any(_memory(found) == _memory(other) for other in (*results, *tensors))
            results.append(found.clone() if shares else found)
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
        return [layout(values[node]) for node, layout in zip(self.outputs, self.layouts, strict=True)]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def compiled_graph(
    reference: GraphModule,
    plan: Plan,
    table: RegionTable,
    inside: Mapping[str, nn.Module] = MappingProxyType({}),
) -> GraphModule | None:
    """Return the graph that torch.compile sees; None if it sees the reference graph.

    Args:
        table: the regions of the graph are added to it.
        inside: path of a module in ``reference`` -> the module to call in its place, which has regions too.
    """
    if not table.owner or not (plan.kernels or inside):
        return None
    levels = levels_of(reference.graph, plan)
    regions = tuple(_regions(reference, plan, levels))
    if not (regions or inside) or not levels.level_of or not all(map(_takes_and_returns_tensors, regions)):
        return None
    module = GraphModule(nn.Module(), Graph())
    share_state(module, reference)
    names = {path: f"module_{index}" for index, path in enumerate(inside)}
    vars(module)[MADE] = SimpleNamespace(**{name: inside[path] for path, name in names.items()})
    paths = {path: f"{MADE}.{name}" for path, name in names.items()}
    module.graph = _outer_graph(reference.graph, levels, regions, table, paths)
    table.regions += regions
    return module


def _regions(reference: GraphModule, plan: Plan, levels: Levels) -> Iterator[KernelRegion]:
    order = {node: index for index, node in enumerate(reference.graph.nodes)}
    in_images, is_first = images(reference.graph), True
    for members in levels.regions():
        inside = set(members)
        inputs = [source for source in dict.fromkeys(levels.sources(members)) if source not in inside]
        sizes = [source for source in inputs if isinstance(example_value(source), SCALARS)]
        tensors = [source for source in inputs if source not in sizes]
        floats = [user for node in members for user in node.users if _is_read_in_floats(user, levels)]
        nodes = sorted({*members, *floats, *_free_behind(members, levels)}, key=order.__getitem__)
        outputs = [node for node in members if _is_read_as_it_is(node, inside, levels)] + floats
        if outputs:
            layouts = [layout_of(node, in_images) for node in outputs]
            yield KernelRegion(
                reference, plan, inside, nodes, tensors, sizes, outputs, layouts, is_first=is_first
            )
            is_first = False


def _free_behind(nodes: Iterable[Node], levels: Levels) -> Iterator[Node]:
    for node in nodes:
        free = [source for source in levels.reads[node] if source in levels.free]
        yield from free
        yield from _free_behind(free, levels)


def _is_read_in_floats(dequantize: Node, levels: Levels) -> bool:
    """Return whether not only kernels read ``dequantize``; torch makes floats faster than plain integers."""
    return dequantize in levels.free and any(not levels.is_in_region(user) for user in dequantize.users)


def _is_read_as_it_is(node: Node, inside: Container[Node], levels: Levels) -> bool:
    direct = (user for user in node.users if user not in levels.free)
    behind = (user for each in node.users if each in levels.free for user in each.users)
    return any(user not in inside for user in direct) or any(
        user not in inside and levels.is_in_region(user) for user in behind
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


def _outer_graph(
    graph: Graph,
    levels: Levels,
    regions: Sequence[KernelRegion],
    table: RegionTable,
    paths: Mapping[str, str],
) -> Graph:
    outer, copies, first = Graph(), {}, len(table.regions)

    def copy_of(node: Node) -> Node:
        if node not in copies:
            copies[node] = outer.node_copy(node, copy_of)
            if node.op == "call_module":
                copies[node].target = paths.get(str(node.target), node.target)
            else:
                copies[node].target = COPYING.get(node.target, node.target)
        return copies[node]

    def call(index: int, region: KernelRegion) -> None:
        tensors, sizes = ([*map(copy_of, read)] for read in (region.tensors, region.sizes))
        results = outer.call_function(REGION_OPERATOR, (tensors, sizes, table.owner, index, region.digest))
        for position, node in enumerate(region.outputs):
            copies[node] = outer.call_function(operator.getitem, (results, position))
            copies[node].meta = dict(node.meta)

    waiting = deque(enumerate(regions, first))
    # Lower levels first, in the order of the graph within each.
    for node in sorted(levels.level_of, key=levels.level_of.__getitem__):
        if node.op == "output":
            continue
        if not levels.is_in_region(node):
            copy_of(node)
        elif waiting and node in waiting[0][1].members:
            call(*waiting.popleft())
    copy_of(graph.output_node())
    outer.set_codegen(graph._codegen)
    kept = ("call_module", "placeholder", "output")
    outer.eliminate_dead_code(lambda node: node.op in kept or node.target in CHECKS)
    return outer
