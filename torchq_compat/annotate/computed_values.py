"""Values that stay float because they count, index or measure: buffers updated in place, and constants."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from torchq_compat.ops import moved_by
from torchq_compat.support.graph_nodes import attribute_of

# Ops that update a buffer from its own old value, like a counter or a moving average: they stay float.
#
# On 8 bits such a buffer would stop at the end of the calibrated range, or wherever an increment is smaller
# than half a step: FX keeps the steps of ``x`` for ``0.01 * x``. A state that goes through a weight or a
# gate, as in a hand-written recurrent cell, is data.


ATEN = torch.ops.aten
COPY = ATEN.copy_.default


def buffer_updates(graph_module: GraphModule) -> dict[Node, str]:
    """Return the ops that update a buffer from its old value -> the name of the buffer.

    They are the op whose result is written, if it reads the old value or what is computed from it and
    constants alone, the ops on the way from the old value, those that only move the result, and those that
    compute increments for nothing else.
    """
    updates: dict[Node, str] = {}
    attributes = _attributes_alone(graph_module)
    for write in graph_module.graph.find_nodes(op="call_function", target=COPY):
        buffer, value = write.args[0], write.args[1]
        if not isinstance(buffer, Node) or buffer.op != "get_attr" or not isinstance(value, Node):
            continue
        name = str(buffer.target)
        *moves, value = _moves_to(value)
        way = [value] if value in attributes else value.all_input_nodes
        way = [node for node in way if name in attributes.get(node, ())]
        if not way or value.op != "call_function":
            continue
        updates.update(dict.fromkeys((value, *moves), name))
        while way:
            node = way.pop()
            if node is value or node not in updates:
                updates[node] = name
                way.extend(each for each in node.all_input_nodes if name in attributes[each])
        _add_increments(value, name, updates)
    return updates


def _add_increments(value: Node, name: str, updates: dict[Node, str]) -> None:
    """Add to ``updates`` the ops that compute for ``value`` alone, back to those with weights."""
    increments = list(value.all_input_nodes)
    while increments:
        node = increments.pop()
        is_only_for_it = node.op == "call_function" and all(user in updates for user in node.users)
        if node not in updates and is_only_for_it and all(n.op != "get_attr" for n in node.all_input_nodes):
            updates[node] = name
            increments.extend(node.all_input_nodes)


def _moves_to(node: Node) -> list[Node]:
    """Return ``node`` and what it moves or copies, back to the node that computes the values."""
    found = [node]
    while True:
        source = found[-1].args[1] if found[-1].target is ATEN.copy.default else moved_by(found[-1])
        if not isinstance(source, Node):
            return found
        found.append(source)


def _attributes_alone(graph_module: GraphModule) -> dict[Node, frozenset[str]]:
    """Return the nodes that read no input of the model -> the names of the attributes they read."""
    alone: dict[Node, frozenset[str]] = {}
    for node in graph_module.graph.nodes:
        given = node.all_input_nodes
        if node.op == "get_attr":
            alone[node] = frozenset((str(node.target),))
        elif node.op == "call_function" and given and all(each in alone for each in given):
            alone[node] = frozenset().union(*(alone[each] for each in given))
    return alone


# Ops that compute with sizes and constants alone: grids, positions, rotary angles. They stay float.
#
# FX evaluates what is made of buffers while it traces, and does not observe what is made of sizes. The
# values often have a wide range, and a sine or an inverse behind them that needs all their digits.
# Parameters are data: they are trained, and FX quantizes the ops that read them.


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
