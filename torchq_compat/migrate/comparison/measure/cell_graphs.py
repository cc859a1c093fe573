"""The cells of a converted model as plain values, for drawing: which part reads which."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch.fx import GraphModule, Node

from torchq_compat.custom_modules.parts.part_graph import part_nodes, part_of
from torchq_compat.custom_modules.parts.part_owner import PartOwner
from torchq_compat.migrate.comparison.results import CellGraph, CellNode
from torchq_compat.opaque_calls.insert_calls import opaque_call_nodes

__all__ = ["cell_graphs"]

#: The ``CellNode.formula`` of an input of a cell.
CELL_INPUT = "input of the cell"


def cell_graphs(converted: GraphModule) -> Iterator[CellGraph]:
    """Yield every cell of every custom module in ``converted``."""
    for path in dict.fromkeys(str(call.target) for call in opaque_call_nodes(converted)):
        opaque = converted.get_submodule(path)
        for cell_path, cell in opaque.graphs() if isinstance(opaque, PartOwner) else ():
            yield CellGraph(f"{path}.{cell_path}", tuple(_cell_nodes(cell)))


def _cell_nodes(cell: GraphModule) -> Iterator[CellNode]:
    names = {node: name for name, node in part_nodes(cell)}
    for node in cell.graph.nodes:
        if node.op == "placeholder":
            names[node] = str(node.target)
            yield CellNode(names[node], CELL_INPUT, ())
    for node, name in names.items():
        if node.op != "placeholder":
            inputs = [source for arg in node.all_input_nodes if (source := _named_source(arg, names))]
            yield CellNode(name, part_of(node).formula, tuple(dict.fromkeys(inputs)))


def _named_source(node: Node, names: Mapping[Node, str]) -> str | None:
    """Return the part or input whose value reaches ``node`` through q-dq and slices; None for weights."""
    while node not in names:
        if not node.all_input_nodes:
            return None
        node = node.all_input_nodes[0]
    return names[node]
