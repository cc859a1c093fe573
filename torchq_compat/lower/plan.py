"""The plan of a lowering: what runs on which kernel, decided from the reference graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from torchq_compat.decisions import Action, Decision
from torchq_compat.lower.kernels.binary import BINARY
from torchq_compat.lower.kernels.elementwise import ELEMENTWISE
from torchq_compat.lower.kernels.floating import FLOATING
from torchq_compat.lower.kernels.kernel import KernelCall, Refusal, Rule, Site
from torchq_compat.lower.kernels.normalization import NORMALIZATION
from torchq_compat.lower.kernels.same_grid import CARRIERS, ROUNDING
from torchq_compat.lower.kernels.split_linear import split_linear
from torchq_compat.lower.kernels.weighted import WEIGHTED
from torchq_compat.lower.reading import (
    DEQUANTIZE,
    QUANTIZE,
    has_kernels,
    is_dequantized,
    is_integers,
    tensor_inputs,
)
from torchq_compat.specs.grids import PerTensorGrid

__all__ = ["Plan", "plan_graph"]

ATEN = torch.ops.aten
RULES: dict[Any, Rule] = {**WEIGHTED, **BINARY, **ELEMENTWISE, **NORMALIZATION, **ROUNDING}


@dataclass(frozen=True)
class Plan:
    """What becomes of the nodes of a reference graph.

    Attributes:
        kernels: node -> the kernel call whose result stands for it.
        grids: node -> the grid with kernels that its values lie on.
        carried: ops that run as they are, on quantized tensors.
        decisions: all of it, for people.
    """

    kernels: dict[Node, KernelCall] = field(default_factory=dict)
    grids: dict[Node, PerTensorGrid] = field(default_factory=dict)
    carried: frozenset[Node] = frozenset()
    decisions: tuple[Decision, ...] = ()

    def covered(self) -> set[Node]:
        """Nodes that kernels compute along with others."""
        return {node for call in self.kernels.values() for node in call.covers} - set(self.kernels)


def plan_graph(graph_module: GraphModule, arriving: Mapping[str, PerTensorGrid] | None = None) -> Plan:
    """Decide for every op of ``graph_module``, a q-dq graph.

    Args:
        arriving: input, by its name -> the grid that the floats it is given lie on.
    """
    elsewhere = _devices(graph_module) - {"cpu"}
    if elsewhere:
        reason = f"its state is on {', '.join(sorted(elsewhere))}; the kernels run on the CPU"
        return Plan(decisions=(Decision("", "convert_fx", Action.REFERENCE, reason),))
    grids = _arriving(graph_module, arriving or {})
    kernels: dict[Node, KernelCall] = {}
    carried: set[Node] = set()
    refusals: dict[Node, str] = {}
    for node in graph_module.graph.nodes:
        grid = _grid_of(node, grids)
        if grid is not None:
            grids[node] = grid
            if _carries(node):
                carried.add(node)
        if node in carried or node.op != "call_function":
            continue
        result, answer = _ask(graph_module, node, grids)
        if isinstance(answer, KernelCall):
            kernels[result] = answer
        elif not _reads_quantized(node, grids):
            continue
        elif isinstance(answer, Refusal):
            refusals[node] = answer.reason
        elif result is not node and not _has_rule(node):
            refusals[node] = "it has no integer kernel here"
    decisions = tuple(_decisions(graph_module, kernels, carried, refusals))
    return Plan(kernels, grids, frozenset(carried), decisions)


def _arriving(graph_module: GraphModule, by_name: Mapping[str, PerTensorGrid]) -> dict[Node, PerTensorGrid]:
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    named = {node: by_name[str(node.target)] for node in placeholders if str(node.target) in by_name}
    return {node: grid for node, grid in named.items() if has_kernels(grid)}


def _devices(graph_module: GraphModule) -> set[str]:
    return {str(tensor.device) for tensor in (*graph_module.parameters(), *graph_module.buffers())}


def _grid_of(node: Node, grids: dict[Node, PerTensorGrid]) -> PerTensorGrid | None:
    """The grid with kernels that the values at ``node`` lie on."""
    if node.target is DEQUANTIZE:
        source, grid = node.args[0], PerTensorGrid.of_node(node)
        assert isinstance(source, Node)
        is_plain = not node.kwargs and is_integers(source) and grids.get(source, grid) == grid
        return grid if is_plain and has_kernels(grid) else None
    if node.target is QUANTIZE:
        grid = PerTensorGrid.of_node(node)
        return grid if has_kernels(grid) else None
    if _carries(node):
        found = {grids.get(source) for source in tensor_inputs(node)}
        return found.pop() if len(found) == 1 else None
    return None


def _carries(node: Node) -> bool:
    return node.target in CARRIERS and CARRIERS[node.target](node)


def _ask(
    graph_module: GraphModule, op: Node, grids: dict[Node, PerTensorGrid]
) -> tuple[Node, KernelCall | Refusal | None]:
    """(the node a kernel's result would stand for, what the rules say) about ``op``."""
    relu = _only_reader(op, ATEN.relu.default)
    last = relu or op
    quantize = _only_reader(last, QUANTIZE)
    grid = None if quantize is None else _grid_of(quantize, grids)
    site = Site(graph_module, op, relu, grid, grids.get)
    if op.target in FLOATING:
        answer = FLOATING[op.target](site)
        if isinstance(answer, KernelCall):
            return answer.stands_for or last, answer
        if answer is not None:
            return last, answer
    result = quantize or last
    if op.target is ATEN.linear.default:
        answer = split_linear(site)
        if answer is not None:
            return result, answer
    if op.target not in RULES or (grid is None and op.target not in WEIGHTED):
        return result, None
    return result, RULES[op.target](site)


def _has_rule(node: Node) -> bool:
    return node.target in RULES or node.target in FLOATING


def _only_reader(node: Node, target: Any) -> Node | None:
    """The one node that reads ``node``, if it calls ``target``."""
    reader = next(iter(node.users), None)
    return reader if reader is not None and len(node.users) == 1 and reader.target is target else None


def _decisions(
    graph_module: GraphModule,
    kernels: dict[Node, KernelCall],
    carried: set[Node],
    refusals: dict[Node, str],
) -> Iterator[Decision]:
    by_op = {call.covers[0]: call for call in kernels.values()}
    covered = {node for call in kernels.values() for node in call.covers}
    for node in graph_module.graph.nodes:
        if node in by_op:
            yield _decision(node, Action.LOWERED, f"runs as {by_op[node].label}")
        elif node in carried:
            yield _decision(node, Action.LOWERED, "runs on the integers as it is")
        elif node in refusals and node not in covered:
            reason = f"runs in floats between its q-dq: {refusals[node]}"
            yield _decision(node, Action.REFERENCE, reason)


def _reads_quantized(node: Node, grids: Mapping[Node, PerTensorGrid]) -> bool:
    """Whether the reference graph quantizes an input of ``node``."""
    return any(is_dequantized(source) or source in grids for source in node.all_input_nodes)


def _decision(node: Node, action: Action, reason: str) -> Decision:
    stack = node.meta.get("nn_module_stack") or {}
    path = str(list(stack.values())[-1][0]) if stack else ""
    place = f"{path}/{node.name}" if path else node.name
    return Decision(place, str(node.target), action, reason, node=node.name)
