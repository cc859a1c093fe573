"""The plan of a lowering: what runs on which kernel, decided from the reference graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from torchq_compat.decisions import Action, Decision
from torchq_compat.lower.kernels.binary import BINARY
from torchq_compat.lower.kernels.elementwise import ELEMENTWISE
from torchq_compat.lower.kernels.floating import FLOATING
from torchq_compat.lower.kernels.kernel import KernelCall, Refusal, Rule, Site
from torchq_compat.lower.kernels.same_grid import CARRIERS, ROUNDING
from torchq_compat.lower.kernels.weighted import WEIGHTED
from torchq_compat.lower.reading import (
    DEQUANTIZE,
    DEQUANTIZE_PER_CHANNEL,
    QUANTIZE,
    SIZE_OPS,
    has_kernels,
    is_integers,
    tensor_inputs,
)
from torchq_compat.specs.grids import PerTensorGrid

__all__ = ["Plan", "plan_graph"]

ATEN = torch.ops.aten
RULES: dict[Any, Rule] = {**WEIGHTED, **BINARY, **ELEMENTWISE, **ROUNDING}


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

    @property
    def lowers_nothing(self) -> bool:
        return not self.kernels and not self.carried


def plan_graph(graph_module: GraphModule) -> Plan:
    """Decide for every op of ``graph_module``, a q-dq graph."""
    grids: dict[Node, PerTensorGrid] = {}
    kernels: dict[Node, KernelCall] = {}
    carried: set[Node] = set()
    refusals: dict[Node, str] = {}
    for node in graph_module.graph.nodes:
        grid = _grid_of(node, grids)
        if grid is not None:
            grids[node] = grid
            if node.target in CARRIERS:
                carried.add(node)
        if node in carried or node.op != "call_function":
            continue
        result, answer = _ask(graph_module, node, grids)
        if isinstance(answer, KernelCall):
            kernels[result] = answer
        elif isinstance(answer, Refusal):
            refusals[node] = answer.reason
    decisions = tuple(_decisions(graph_module, kernels, carried, refusals))
    return Plan(kernels, grids, frozenset(carried), decisions)


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
    if node.target in CARRIERS:
        found = {grids.get(source) for source in tensor_inputs(node)}
        return found.pop() if len(found) == 1 else None
    return None


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
        if answer is not None:
            return last, answer
    if op.target not in RULES:
        return op, None
    return quantize or last, RULES[op.target](site)


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
            yield _decision(node, Action.LOWERED, f"runs as {by_op[node].kernel}")
        elif node in carried:
            yield _decision(node, Action.LOWERED, "runs on the integers as it is")
        elif node not in covered and _is_quantized_op(node, refusals):
            reason = refusals.get(node, "it has no integer kernel here")
            yield _decision(node, Action.REFERENCE, f"runs in floats between its q-dq: {reason}")


def _is_quantized_op(node: Node, refusals: dict[Node, str]) -> bool:
    """Whether ``node`` is an op that the reference graph quantizes."""
    if node in refusals:
        return True
    if node.op != "call_function" or node.target in (DEQUANTIZE, DEQUANTIZE_PER_CHANNEL, QUANTIZE, *SIZE_OPS):
        return False
    return any(source.target in (DEQUANTIZE, DEQUANTIZE_PER_CHANNEL) for source in node.all_input_nodes)


def _decision(node: Node, action: Action, reason: str) -> Decision:
    stack = node.meta.get("nn_module_stack") or {}
    path = str(list(stack.values())[-1][0]) if stack else ""
    place = f"{path}/{node.name}" if path else node.name
    return Decision(place, str(node.target), action, reason, node=node.name)
