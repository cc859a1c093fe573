"""Compute values that no step of a loop changes, such as float weights of a recurrent layer, before the loop.

The results are exact: the operators and their inputs are the same. The float copy takes no more memory than
inside the loop, where it was computed again at every step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassResult

__all__ = ["move_loop_invariants"]

SCAN = torch.ops.higher_order.scan


def move_loop_invariants(graph_module: GraphModule) -> PassResult:
    """Move invariant calls out of the body of every ``scan``, in place."""
    moved = [_move_out_of(graph_module, scan) for scan in graph_module.graph.nodes if scan.target is SCAN]
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()
    return PassResult(graph_module, any(moved))


def _move_out_of(graph_module: GraphModule, scan: Node) -> bool:
    body_name, init, inputs, constants = scan.args
    assert isinstance(body_name, Node)
    assert isinstance(init, (list, tuple))
    assert isinstance(inputs, (list, tuple))
    assert isinstance(constants, (list, tuple))
    body = graph_module.get_submodule(str(body_name.target))
    assert isinstance(body, GraphModule)
    arguments = body.graph.find_nodes(op="placeholder")[len(init) + len(inputs) :]
    outside: dict[Node, Any] = dict(zip(arguments, constants, strict=True))
    invariant = _invariant(body, outside)
    with graph_module.graph.inserting_before(scan):
        for node in invariant:
            outside[node] = graph_module.graph.node_copy(node, outside.__getitem__)
    for node in invariant:
        if any(user not in outside for user in node.users):
            _take_as_argument(body, arguments, node, outside)
    for node in reversed(invariant):
        body.graph.erase_node(node)
    kept = [argument for argument in arguments if argument.users]
    for argument in arguments:
        if not argument.users:
            body.graph.erase_node(argument)
    scan.args = (body_name, init, inputs, tuple(outside[argument] for argument in kept))
    body.recompile()
    return bool(invariant)


def _invariant(body: GraphModule, constants: dict[Node, Any]) -> list[Node]:
    """Return the calls that depend on ``constants`` alone, in the order of the graph."""
    known = set(constants)
    found = []
    for node in body.graph.nodes:
        if node.op == "call_function" and node.all_input_nodes and known.issuperset(node.all_input_nodes):
            known.add(node)
            found.append(node)
    return found


def _take_as_argument(body: GraphModule, arguments: list[Node], node: Node, outside: dict[Node, Any]) -> None:
    """Make the body read ``node``, which is now computed outside, from an additional argument."""
    last = body.graph.find_nodes(op="placeholder")[-1]
    with body.graph.inserting_after(last):
        argument = body.graph.placeholder(f"{node.name}_outside")
    argument.meta = dict(node.meta)
    node.replace_all_uses_with(argument, delete_user_cb=lambda user: user not in outside)
    outside[argument] = outside[node]
    arguments.append(argument)
