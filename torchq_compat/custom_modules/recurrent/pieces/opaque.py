"""Opaque: one ``call_module`` that loops over time in Python around cells that are graphs of their own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from torchq_compat.custom_modules.recurrent.aten_lstm import AtenLSTM
from torchq_compat.custom_modules.recurrent.cell_graph import CellGraphModule
from torchq_compat.custom_modules.recurrent.layers import RecurrentDirection, RecurrentLayer
from torchq_compat.custom_modules.recurrent.pieces.writer import PieceWriter, free_name

__all__ = ["OpaqueLSTM", "write_opaque"]


class OpaqueLSTM(nn.Module):
    """(x, h0, c0) -> (output, h_n, c_n), as ``aten.lstm.input`` takes and gives them, for any length.

    Cells are at ``layers.<i>.layer_fw.cell`` and ``layers.<i>.layer_bw.cell``.
    """

    def __init__(
        self, layers: list[RecurrentLayer], *, hidden_width: int, batch_first: bool, dropout: float
    ) -> None:
        super().__init__()
        self.hidden_width = hidden_width
        self.layers = nn.ModuleList(layers)
        self.batch_first = batch_first
        self.dropout = dropout

    def directions(self) -> list[RecurrentDirection]:
        """Every direction, in the order of the rows of the states."""
        found: list[RecurrentDirection] = []
        for layer in self.layers:
            assert isinstance(layer, RecurrentLayer)
            found.extend(layer.directions())
        return found

    def forward(self, x: Tensor, h0: Tensor, c0: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        states = list(zip(h0.unbind(0), c0.unbind(0), strict=True))
        x = x.transpose(0, 1) if self.batch_first else x
        last: list[tuple[Tensor, Tensor]] = []
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, RecurrentLayer)
            if index and self.dropout:
                x = F.dropout(x, self.dropout)
            first = len(last)
            x, ends = layer(x, states[first : first + len(layer.directions())])
            last.extend(ends)
        h_n, c_n = (torch.stack(rows) for rows in zip(*last, strict=True))
        return (x.transpose(0, 1) if self.batch_first else x), h_n, c_n


def write_opaque(
    writer: PieceWriter, lstm: AtenLSTM, cells: dict[str, GraphModule]
) -> tuple[Node, Node, Node]:
    """Nodes for the three results of ``lstm``."""
    layers = []
    for directions in lstm.layers():
        graphs = [CellGraphModule.wrap(cells[direction.path]) for direction in directions]
        layers.append(RecurrentLayer([RecurrentDirection(graph) for graph in graphs]))
    module = OpaqueLSTM(
        layers,
        hidden_width=int(lstm.h0.meta["val"].shape[-1]),
        batch_first=lstm.batch_first,
        dropout=lstm.dropout,
    )
    name = free_name(writer.graph_module, f"{lstm.node.name}_pieces")
    call = writer.module(name, module, lstm.x, lstm.h0, lstm.c0)
    output, h_n, c_n = (writer.getitem(call, index) for index in range(3))
    return output, h_n, c_n
