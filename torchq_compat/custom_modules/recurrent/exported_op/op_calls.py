"""Calls of the opaque operator with converted cells, in an export that requests them."""

from __future__ import annotations

import json
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor
from torch.fx import GraphModule

from torchq_compat.custom_modules.recurrent.cell.cell_graph import CellGraphModule
from torchq_compat.custom_modules.recurrent.exported_op.graph_text import graph_to_data
from torchq_compat.custom_modules.recurrent.exported_op.recurrent_op import QUANTIZED_RECURRENT
from torchq_compat.custom_modules.recurrent.over_time import State
from torchq_compat.qspecs.qparams import q_dq

__all__ = ["OpaqueDirection", "call_opaque"]


@dataclass(frozen=True)
class OpaqueDirection:
    """One direction of one layer.

    Attributes:
        cell: (x, *states) -> the new states.
        before: x of all steps -> the input of the cell at all steps; None: the cell's input is x.
        batch_first: whether x is a view (T, B, I) of a tensor that the caller passed as (B, T, I).
    """

    cell: CellGraphModule
    before: GraphModule | None = None
    batch_first: bool = False

    def graphs(self) -> list[GraphModule]:
        return [self.cell] if self.before is None else [self.before, self.cell]


def call_opaque(
    layers: Sequence[Sequence[OpaqueDirection]], x: Tensor, states: Sequence[State]
) -> tuple[Tensor, list[State]]:
    """Call the operator: ``x`` (T, B, I) and the states of every direction, (B, width) each -> (T, B, D*P)
    and the last states. The results are followed by q-dq with their own qparams, which change no value."""
    directions = list(chain.from_iterable(layers))
    cells = [
        [[graph_to_data(each.graph) for each in direction.graphs()] for direction in layer]
        for layer in layers
    ]
    weights = [
        weight for direction in directions for graph in direction.graphs() for weight in _weights(graph)
    ]
    flat = list(chain.from_iterable(states))
    results = QUANTIZED_RECURRENT(x, flat, weights, json.dumps(cells), directions[0].batch_first)
    all_qparams = [direction.cell.state_qparams() for direction in directions]
    count = len(layers[-1])
    outputs = [
        q_dq(output, hidden)
        for output, (hidden, *_) in zip(results[:count], all_qparams[-count:], strict=True)
    ]
    new = iter(results[count:])
    last = [tuple(q_dq(next(new), qparams) for qparams in of_cell) for of_cell in all_qparams]
    return (outputs[0] if count == 1 else torch.cat(outputs, -1)), last


def _weights(graph_module: GraphModule) -> list[Tensor]:
    nodes = graph_module.graph.find_nodes(op="get_attr")
    return [operator.attrgetter(str(node.target))(graph_module) for node in nodes]
