"""Layers and directions, written as nodes around a loop over time that the shape decides.

Glue: the rows of the states, the order of time and batch, the stacking of results.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import Node

from torchq_compat.exported_lstm.aten_lstm import AtenLSTM, Direction
from torchq_compat.exported_lstm.writer import ATEN, NodeWriter

__all__ = ["WriteDirection", "flipped", "write_layers"]

#: (direction, x (T, B, I), h (B, P), c (B, H)) -> output (T, B, P), last h, last c.
WriteDirection = Callable[[Direction, Node, Node, Node], tuple[Node, Node, Node]]


def write_layers(
    writer: NodeWriter, lstm: AtenLSTM, write_direction: WriteDirection
) -> tuple[Node, Node, Node]:
    """Nodes for output, h_n and c_n of ``lstm``."""
    x = writer.glue(ATEN.transpose.int, lstm.x, 0, 1) if lstm.batch_first else lstm.x
    last_hidden: list[Node] = []
    last_cell: list[Node] = []
    for index, directions in enumerate(lstm.layers()):
        if index and lstm.dropout:
            x = writer.glue(ATEN.dropout.default, x, lstm.dropout, True)
        outputs = []
        for direction in directions:
            h, c = (writer.glue(ATEN.select.int, state, 0, direction.row) for state in (lstm.h0, lstm.c0))
            output, h, c = write_direction(direction, x, h, c)
            outputs.append(output)
            last_hidden.append(h)
            last_cell.append(c)
        x = outputs[0] if len(outputs) == 1 else writer.glue(ATEN.cat.default, outputs, -1)
    output = writer.glue(ATEN.transpose.int, x, 0, 1) if lstm.batch_first else x
    h_n, c_n = (writer.glue(ATEN.stack.default, rows) for rows in (last_hidden, last_cell))
    return output, h_n, c_n


def flipped(writer: NodeWriter, x: Node) -> Node:
    """Return ``x`` with time reversed."""
    return writer.glue(ATEN.flip.default, x, [0])
