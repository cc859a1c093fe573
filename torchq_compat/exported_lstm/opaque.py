"""The opaque shape: one ``call_module`` that runs each cell's own graph in a Python loop over time."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from torchq_compat.custom_modules.recurrent.cell.cell_graph import CellGraphModule
from torchq_compat.custom_modules.recurrent.modules.layers import RecurrentDirection, RecurrentLayer
from torchq_compat.custom_modules.recurrent.modules.runners import PythonRunner, Sequences
from torchq_compat.custom_modules.recurrent.over_time import State
from torchq_compat.exported_lstm.aten_recurrent import AtenRecurrent
from torchq_compat.exported_lstm.writer import NodeWriter
from torchq_compat.support.graph_nodes import free_name

__all__ = ["OpaqueRecurrent", "write_opaque"]


class OpaqueRecurrent(nn.Module):
    """A module that replaces the operator, for any length: (x, *states) -> (output, *last states).

    Its cells are at ``layers.<i>.layer_fw.cell`` and ``layers.<i>.layer_bw.cell``.
    """

    def __init__(self, recurrent: AtenRecurrent, cells: dict[str, GraphModule]) -> None:
        super().__init__()
        self.batch_first = recurrent.batch_first
        self.dropout = recurrent.dropout
        self.output_size = int(recurrent.states[0].meta["val"].shape[-1])
        self.layers = nn.ModuleList(
            RecurrentLayer(
                [RecurrentDirection(CellGraphModule.wrap(cells[direction.path])) for direction in directions]
            )
            for directions in recurrent.layers()
        )

    def by_layer(self) -> list[tuple[RecurrentDirection, ...]]:
        """Return the directions of each layer, in the order of the rows of the states."""
        return [layer.directions() for layer in self.layers if isinstance(layer, RecurrentLayer)]

    def directions(self) -> list[RecurrentDirection]:
        """Return the directions of all layers."""
        return [direction for layer in self.by_layer() for direction in layer]

    def forward(self, x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        rows: list[State] = list(zip(*(state.unbind(0) for state in states), strict=True))
        x = x.transpose(0, 1) if self.batch_first else x
        layers = [layer for layer in self.layers if isinstance(layer, RecurrentLayer)]
        x, last = PythonRunner().run_layers(layers, Sequences(x), rows, self.dropout)
        ends = (torch.stack(rows) for rows in zip(*last, strict=True))
        return (x.transpose(0, 1) if self.batch_first else x), *ends


def write_opaque(
    writer: NodeWriter, recurrent: AtenRecurrent, cells: dict[str, GraphModule]
) -> tuple[Node, ...]:
    """Write nodes for the results of ``recurrent``, and return them."""
    name = free_name(writer.graph_module, f"{recurrent.node.name}_decomposed")
    call = writer.module(name, OpaqueRecurrent(recurrent, cells), recurrent.x, *recurrent.states)
    return tuple(writer.getitem(call, index) for index in range(1 + len(recurrent.states)))
