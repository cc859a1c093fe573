"""Opaque: one ``call_module`` that loops over time in Python around cells that are graphs of their own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from torchq_compat.custom_modules.recurrent.aten_lstm import AtenLSTM
from torchq_compat.custom_modules.recurrent.pieces.writer import PieceWriter, free_name

__all__ = ["OpaqueDirection", "OpaqueLSTM", "write_opaque"]


class OpaqueDirection(nn.Module):
    """One direction of one layer: its cell, run over time."""

    def __init__(self, cell: GraphModule, *, backward: bool) -> None:
        super().__init__()
        self.cell = cell
        self.backward = backward

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``x`` (T, B, I), ``h`` (B, P), ``c`` (B, H) -> output (T, B, P), last h, last c."""
        steps = x.unbind(0)
        outputs = []
        for step in reversed(steps) if self.backward else steps:
            h, c = self.cell(step, h, c)
            outputs.append(h)
        if self.backward:
            outputs.reverse()
        return torch.stack(outputs), h, c


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
            nn.ModuleDict(
                {
                    direction.name: OpaqueDirection(cells[direction.path], backward=direction.backward)
                    for direction in directions
                }
            )
            for directions in lstm.layers()
        )

    def by_layer(self) -> list[list[OpaqueDirection]]:
        """The directions of each layer, in the order of the rows of the states."""
        return [[d for d in layer.children() if isinstance(d, OpaqueDirection)] for layer in self.layers]

    def directions(self) -> list[OpaqueDirection]:
        """All of them."""
        return [direction for layer in self.by_layer() for direction in layer]

    def forward(self, x: Tensor, h0: Tensor, c0: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        states = zip(h0.unbind(0), c0.unbind(0), strict=True)
        x = x.transpose(0, 1) if self.batch_first else x
        last: list[tuple[Tensor, Tensor]] = []
        for index, directions in enumerate(self.by_layer()):
            if index and self.dropout:
                x = F.dropout(x, self.dropout)
            results = [direction(x, *next(states)) for direction in directions]
            x = torch.cat([output for output, _, _ in results], -1)
            last.extend((h, c) for _, h, c in results)
        h_n, c_n = (torch.stack(rows) for rows in zip(*last, strict=True))
        return (x.transpose(0, 1) if self.batch_first else x), h_n, c_n


def write_opaque(
    writer: PieceWriter, lstm: AtenLSTM, cells: dict[str, GraphModule]
) -> tuple[Node, Node, Node]:
    """Nodes for the three results of ``lstm``."""
    name = free_name(writer.graph_module, f"{lstm.node.name}_pieces")
    call = writer.module(name, OpaqueLSTM(lstm, cells), lstm.x, lstm.h0, lstm.c0)
    output, h_n, c_n = (writer.getitem(call, index) for index in range(3))
    return output, h_n, c_n
