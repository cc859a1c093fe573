"""Writes layers and directions as nodes around the loop over time, which depends on the shape.

The nodes written here are glue: they select rows of the states, transpose time and batch, and stack results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.fx import Node

from torchq_compat.exported_lstm.aten_recurrent import AtenRecurrent, Direction
from torchq_compat.exported_lstm.writer import ATEN, NodeWriter

__all__ = ["WriteDirection", "flipped", "write_layers"]

#: (direction, x (T, B, I), states (B, width)) -> output (T, B, P), last states.
WriteDirection = Callable[[Direction, Node, Sequence[Node]], tuple[Node, Sequence[Node]]]


def write_layers(
    writer: NodeWriter, recurrent: AtenRecurrent, write_direction: WriteDirection
) -> tuple[Node, ...]:
    """Write nodes for the output and the last states of ``recurrent``, and return them."""
    x = writer.glue(ATEN.transpose.int, recurrent.x, 0, 1) if recurrent.batch_first else recurrent.x
    last: list[Sequence[Node]] = []
    for index, directions in enumerate(recurrent.layers()):
        if index and recurrent.dropout:
            x = writer.glue(ATEN.dropout.default, x, recurrent.dropout, True)
        outputs = []
        for direction in directions:
            states = [writer.glue(ATEN.select.int, state, 0, direction.row) for state in recurrent.states]
            output, ends = write_direction(direction, x, states)
            outputs.append(output)
            last.append(ends)
        x = outputs[0] if len(outputs) == 1 else writer.glue(ATEN.cat.default, outputs, -1)
    output = writer.glue(ATEN.transpose.int, x, 0, 1) if recurrent.batch_first else x
    rows = zip(*last, strict=True)
    return output, *(writer.glue(ATEN.stack.default, list(each)) for each in rows)


def flipped(writer: NodeWriter, x: Node) -> Node:
    """Write ``x`` with time reversed, and return the node."""
    return writer.glue(ATEN.flip.default, x, [0])
