"""The cell of an exported LSTM as a graph: (x (B, I), h (B, P), c (B, H)) -> (h', c'), with a free batch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import GraphModule

from torchq_compat.capture.export import capture_flat
from torchq_compat.custom_modules.recurrent.lstm_cell import LSTMCellFloat

__all__ = ["float_cell_graph"]

GATES = 4


def float_cell_graph(weights: dict[str, Tensor]) -> GraphModule:
    """Export a cell that owns copies of ``weights``, by the names of ``nn.LSTM`` without the suffix."""
    weight_ih, weight_hh = weights["weight_ih"], weights["weight_hh"]
    widths = (weight_ih.shape[1], weight_hh.shape[1], weight_hh.shape[0] // GATES)
    example = tuple(torch.zeros(2, width, device=weight_ih.device) for width in widths)
    return capture_flat(LSTMCellFloat(weights, split_gates=False), example)
