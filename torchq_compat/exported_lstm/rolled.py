"""The rolled shape: one ``scan`` over time for each direction, whose body is the cell.

torchao prepares and converts the body of a scan along with the graph. The body owns its weights, so that they
are folded to integers; weights passed as the scan's additional inputs would stay float.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from torchq_compat.exported_lstm.aten_recurrent import AtenRecurrent, Direction
from torchq_compat.exported_lstm.write_layers import flipped, write_layers
from torchq_compat.exported_lstm.writer import ATEN, NodeWriter
from torchq_compat.support.graph_nodes import free_name

__all__ = ["SCAN", "write_rolled"]

SCAN = torch.ops.higher_order.scan


def write_rolled(
    writer: NodeWriter, recurrent: AtenRecurrent, cells: dict[str, GraphModule]
) -> tuple[Node, ...]:
    """Write nodes for the results of ``recurrent``, and return them."""

    def write_direction(direction: Direction, x: Node, states: Sequence[Node]) -> tuple[Node, Sequence[Node]]:
        # torchao sets the prepared body with setattr, which fails for a path with dots.
        name = f"{recurrent.node.name}_{direction.path.replace('.', '_')}"
        body = writer.body(free_name(writer.graph_module, name), scan_body(cells[direction.path]))
        steps = flipped(writer, x) if direction.backward else x
        values = [state.meta["val"] for state in states]
        sizes = (x.meta["val"].shape[0], *values[0].shape)
        scan = writer.glue(SCAN, body, list(states), [steps], (), value=[*values, values[0].new_empty(sizes)])
        *last, outputs = (writer.getitem(scan, index) for index in range(len(states) + 1))
        return (flipped(writer, outputs) if direction.backward else outputs), last

    return write_layers(writer, recurrent, write_direction)


def scan_body(cell: GraphModule) -> GraphModule:
    """Return ``cell``, (x, *states) -> new states, as a scan calls it: (*states, x) -> (*new states, y).

    y is a copy of the hidden state, the first state, because a carried value must not also be an output.
    """
    graph, owned = Graph(), nn.Module()
    copied: dict[Node, Node] = {}
    x, *states = (node for node in cell.graph.nodes if node.op == "placeholder")
    for placeholder in (*states, x):
        copied[placeholder] = graph.node_copy(placeholder)
    for node in cell.graph.nodes:
        if node.op not in ("placeholder", "output"):
            copied[node] = graph.node_copy(node, lambda argument: copied[argument])
        if node.op == "get_attr":
            # torchao's convert of the outer graph deletes the submodules of a body, not its own parameters.
            name = str(node.target).replace(".", "_")
            owned.register_parameter(name, cell.get_parameter(str(node.target)))
            copied[node].target = name
    results: Any = cell.graph.output_node().args[0]
    new = [copied[result] for result in results]
    y = graph.call_function(ATEN.clone.default, (new[0],))
    y.meta = dict(new[0].meta)
    graph.output((*new, y))
    return GraphModule(owned, graph)
