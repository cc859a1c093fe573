"""The unrolled shape: the cell's nodes once for every time step, with one set of weights.

Each node of a step records the node of the cell that it copies, so that all steps can share the observers of
the first step.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from torchq_compat.errors import AtenLSTMError
from torchq_compat.exported_lstm.aten_recurrent import AtenRecurrent, Direction
from torchq_compat.exported_lstm.write_layers import write_layers
from torchq_compat.exported_lstm.writer import ATEN, NodeWriter
from torchq_compat.support import metadata
from torchq_compat.support.graph_nodes import free_name

__all__ = ["Copy", "unrolled_cells", "write_unrolled"]


class Copy(NamedTuple):
    """The path of the cell and the node that a node copies, and its step, in the order of computation."""

    cell: str
    node: str
    step: int


def unrolled_cells(graph_module: GraphModule) -> dict[str, GraphModule]:
    """Return the cells that are unrolled in ``graph_module``, by path."""
    return metadata.UNROLLED_CELLS.of(graph_module) or {}


def write_unrolled(
    writer: NodeWriter, recurrent: AtenRecurrent, cells: dict[str, GraphModule]
) -> tuple[Node, ...]:
    """Write nodes for the results of ``recurrent``, and return them.

    Raises:
        AtenLSTMError: if the sequence length is dynamic.
    """
    base = free_name(writer.graph_module, f"{recurrent.node.name}_decomposed")
    length = recurrent.x.meta["val"].shape[1 if recurrent.batch_first else 0]
    if isinstance(length, torch.SymInt):
        raise AtenLSTMError(
            f"the sequence length of {recurrent.node.name!r} is dynamic, so its steps cannot be written out.",
            hint="use shape='rolled' or shape='opaque', or export with a fixed length.",
        )
    _assert_length(writer, recurrent, length)

    def write_direction(direction: Direction, x: Node, states: Sequence[Node]) -> tuple[Node, Sequence[Node]]:
        path, cell = f"{base}.{direction.path}", cells[direction.path]
        weights = _weights(writer, path, cell)
        outputs = []
        order = reversed(range(length)) if direction.backward else range(length)
        for step, time in enumerate(order):
            at_time = writer.glue(ATEN.select.int, x, 0, time)
            states = _write_step(writer, cell, path, step, weights, (at_time, *states))
            outputs.append(states[0])
        if direction.backward:
            outputs.reverse()
        return writer.glue(ATEN.stack.default, outputs), states

    return write_layers(writer, recurrent, write_direction)


def _assert_length(writer: NodeWriter, recurrent: AtenRecurrent, length: int) -> None:
    """Write a check of the length: without it the first steps of a longer sequence would run silently."""
    size = writer.glue(ATEN.sym_size.int, recurrent.x, 1 if recurrent.batch_first else 0, value=length)
    same = writer.glue(operator.eq, size, length, value=True)
    message = f"{recurrent.node.name} was unrolled for sequences of {length} steps"
    writer.glue(ATEN._assert_scalar.default, same, message, value=())


def _weights(writer: NodeWriter, path: str, cell: GraphModule) -> dict[Node, Node]:
    writer.graph_module.add_submodule(path, cell)
    others = unrolled_cells(writer.graph_module)
    metadata.UNROLLED_CELLS.write(writer.graph_module, {**others, path: cell})
    return {
        node: writer.attribute(f"{path}.{node.target}", cell.get_parameter(str(node.target)))
        for node in cell.graph.nodes
        if node.op == "get_attr"
    }


def _write_step(
    writer: NodeWriter,
    cell: GraphModule,
    path: str,
    step: int,
    weights: dict[Node, Node],
    inputs: tuple[Node, ...],
) -> tuple[Node, ...]:
    placeholders = (node for node in cell.graph.nodes if node.op == "placeholder")
    written = {**weights, **dict(zip(placeholders, inputs, strict=True))}
    for node in cell.graph.nodes:
        if node.op == "call_function":
            args: Any = map_arg(node.args, lambda argument: written[argument])
            written[node] = writer.call(
                node.target, *args, **{metadata.COPY.name: Copy(path, node.name, step)}
            )
    results: Any = cell.graph.output_node().args[0]
    return tuple(written[result] for result in results)
