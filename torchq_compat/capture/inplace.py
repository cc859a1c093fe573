"""In-place ops of intermediate values, made out of place; ``x += y`` becomes ``x + y``, as FX traced it.

A converted graph has a dequantize per consumer: an op that writes into one of them would be seen by that
consumer alone. So later readers of the value are handed the result instead.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from torchq_compat.support.upstream import OpOverload

__all__ = ["make_out_of_place"]

ATEN = torch.ops.aten


def make_out_of_place(graph_module: GraphModule) -> None:
    """Rewrite the in-place ops of ``graph_module`` whose target is seen under one name only. What writes
    into buffers, inputs or views stays as it is."""
    order = {node: position for position, node in enumerate(graph_module.graph.nodes)}
    for node in graph_module.graph.nodes:
        functional = _functional_overload(node)
        written = node.args[0] if node.args else None
        if functional is None or not isinstance(written, Node) or not _has_one_name(written):
            continue
        node.target = functional
        for reader in [user for user in written.users if order[user] > order[node]]:
            reader.replace_input_with(written, node)
    graph_module.recompile()


def _functional_overload(node: Node) -> OpOverload | None:
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return None
    name, overload = target._schema.name.removeprefix("aten::"), target._overloadname
    if not target._schema.is_mutable or not name.endswith("_"):
        return None
    packet = getattr(ATEN, name.removesuffix("_"), None)
    return getattr(packet, overload, None) if packet is not None else None


def _has_one_name(written: Node) -> bool:
    """Return whether ``written`` is an intermediate value that neither is a view nor has views."""
    return (
        written.op == "call_function"
        and not _is_view(written)
        and not any(_is_view(user) for user in written.users)
    )


def _is_view(node: Node) -> bool:
    """Return an op whose result may share storage with an argument without writing to it."""
    if not isinstance(node.target, OpOverload):
        return node.op == "call_function"
    schema = node.target._schema
    return not schema.is_mutable and any(result.alias_info is not None for result in schema.returns)
