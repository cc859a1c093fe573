"""Rolled: one ``scan`` over time for each direction, its body the cell.

torchao prepares and converts the body of a scan along with the graph. The body owns its weights, so they are
folded to integers; weights handed in as the scan's additional inputs would stay float.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from torchq_compat.exported_lstm.aten_lstm import AtenLSTM, Direction
from torchq_compat.exported_lstm.write_layers import flipped, write_layers
from torchq_compat.exported_lstm.writer import ATEN, NodeWriter
from torchq_compat.support.graph_nodes import free_name

__all__ = ["SCAN", "write_rolled"]

SCAN = torch.ops.higher_order.scan


def write_rolled(
    writer: NodeWriter, lstm: AtenLSTM, cells: dict[str, GraphModule]
) -> tuple[Node, Node, Node]:
    """Nodes for the three results of ``lstm``."""

    def write_direction(direction: Direction, x: Node, h: Node, c: Node) -> tuple[Node, Node, Node]:
        # torchao sets the prepared body with setattr, which a path with dots would defeat.
        name = f"{lstm.node.name}_{direction.path.replace('.', '_')}"
        body = writer.body(free_name(writer.graph_module, name), scan_body(cells[direction.path]))
        steps = flipped(writer, x) if direction.backward else x
        sizes = (x.meta["val"].shape[0], *h.meta["val"].shape)
        values = [h.meta["val"], c.meta["val"], h.meta["val"].new_empty(sizes)]
        scan = writer.glue(SCAN, body, [h, c], [steps], (), value=values)
        h_n, c_n, outputs = (writer.getitem(scan, index) for index in range(3))
        return (flipped(writer, outputs) if direction.backward else outputs), h_n, c_n

    return write_layers(writer, lstm, write_direction)


def scan_body(cell: GraphModule) -> GraphModule:
    """Return ``cell``, (x, h, c) -> (h', c'), as a scan calls it: (h, c, x) -> (h', c', y).

    y is a copy of h', because a carried value must not be handed out as well.
    """
    graph, owned = Graph(), nn.Module()
    copied: dict[Node, Node] = {}
    x, h, c = (node for node in cell.graph.nodes if node.op == "placeholder")
    for placeholder in (h, c, x):
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
    new_h, new_c = (copied[result] for result in results)
    y = graph.call_function(ATEN.clone.default, (new_h,))
    y.meta = dict(new_h.meta)
    graph.output((new_h, new_c, y))
    return GraphModule(owned, graph)
