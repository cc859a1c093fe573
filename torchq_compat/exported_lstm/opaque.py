"""Opaque: one ``call_module`` that loops over time in Python around cells that are graphs of their own."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from torchq_compat.custom_modules.recurrent.cell.cell_graph import CellGraphModule
from torchq_compat.custom_modules.recurrent.modules.layers import RecurrentDirection, RecurrentLayer
from torchq_compat.custom_modules.recurrent.modules.over_time import State
from torchq_compat.custom_modules.recurrent.modules.runners import PythonRunner, Sequences
from torchq_compat.exported_lstm.aten_lstm import AtenLSTM
from torchq_compat.exported_lstm.writer import NodeWriter
from torchq_compat.support.graph_nodes import free_name

__all__ = ["OpaqueLSTM", "write_opaque"]


class OpaqueLSTM(nn.Module):
    """(x, h0, c0) -> (output, h_n, c_n), as ``aten.lstm.input`` takes and gives them, for any length.

    Cells are at ``layers.<i>.layer_fw.cell`` and ``layers.<i>.layer_bw.cell``.
    """

    def __init__(self, lstm: AtenLSTM, cells: dict[str, GraphModule]) -> None:
        super().__init__()
        self.batch_first = lstm.batch_first
        self.dropout = lstm.dropout
        self.output_size = int(lstm.h0.meta["val"].shape[-1])
        self.layers = nn.ModuleList(
            RecurrentLayer(
                [RecurrentDirection(CellGraphModule.wrap(cells[direction.path])) for direction in directions]
            )
            for directions in lstm.layers()
        )

    def by_layer(self) -> list[tuple[RecurrentDirection, ...]]:
        """Return the directions of each layer, in the order of the rows of the states."""
        return [layer.directions() for layer in self.layers if isinstance(layer, RecurrentLayer)]

    def directions(self) -> list[RecurrentDirection]:
        """Return all of them."""
        return [direction for layer in self.by_layer() for direction in layer]

    def forward(self, x: Tensor, h0: Tensor, c0: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        states: list[State] = list(zip(h0.unbind(0), c0.unbind(0), strict=True))
        x = x.transpose(0, 1) if self.batch_first else x
        layers = [layer for layer in self.layers if isinstance(layer, RecurrentLayer)]
        x, last = PythonRunner().run_layers(layers, Sequences(x), states, self.dropout)
        h_n, c_n = (torch.stack(rows) for rows in zip(*last, strict=True))
        return (x.transpose(0, 1) if self.batch_first else x), h_n, c_n


def write_opaque(
    writer: NodeWriter, lstm: AtenLSTM, cells: dict[str, GraphModule]
) -> tuple[Node, Node, Node]:
    """Nodes for the three results of ``lstm``."""
    name = free_name(writer.graph_module, f"{lstm.node.name}_decomposed")
    call = writer.module(name, OpaqueLSTM(lstm, cells), lstm.x, lstm.h0, lstm.c0)
    output, h_n, c_n = (writer.getitem(call, index) for index in range(3))
    return output, h_n, c_n
