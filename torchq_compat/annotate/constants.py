"""Ops that compute with sizes and constants alone: grids, positions, rotary angles. They stay float.

FX evaluates what is made of buffers while it traces, and does not observe what is made of sizes. The values
often have a wide range, and a sine or an inverse behind them that needs all their digits. Parameters are
data: they are trained, and FX quantizes the ops that read them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from torchq_compat.support.graph_nodes import attribute_of

__all__ = ["find_constants"]

ATEN = torch.ops.aten
#: Reads a size, whatever the tensor holds.
SIZE = ATEN.sym_size.int
#: The tag of an op that returns another result at each call.
RANDOM = torch.Tag.nondeterministic_seeded


def find_constants(graph_module: GraphModule) -> frozenset[Node]:
    """Return the nodes whose values depend on sizes, buffers that are not written, and literals alone."""
    attributes = graph_module.graph.find_nodes(op="get_attr")
    written = {node.target for node in attributes if any(_writes(user, node) for user in node.users)}
    constants = {
        node
        for node in attributes
        if node.target not in written and _is_buffer(attribute_of(graph_module, node))
    }
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and (node.target is SIZE or _computes_from(node, constants)):
            constants.add(node)
    return frozenset(constants)


def _is_buffer(value: object) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter)


def _writes(user: Node, attribute: Node) -> bool:
    return user.target is ATEN.copy_.default and user.args[0] is attribute


def _computes_from(node: Node, constants: set[Node]) -> bool:
    is_random = RANDOM in getattr(node.target, "tags", ())
    return not is_random and all(each in constants for each in node.all_input_nodes)
