"""A converted recurrent module as one operator with readable cells, ``torchq_compat::quantized_recurrent``.

It is used when a program is translated to another format, and when a cell has no program for the native
operator. Its arguments describe the module completely: the weights, and the cells as a text (``graph_text``),
from which a backend with its own recurrent kernel reads every part and its qparams. It computes the same bits
as the converted module.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph

from torchq_compat.custom_modules.recurrent.cell.input_projection import CellFunctions, Function, call_on
from torchq_compat.custom_modules.recurrent.exported_op.graph_text import graph_from_data
from torchq_compat.custom_modules.recurrent.over_time import project_as_given, run_looped_direction

__all__ = ["QUANTIZED_RECURRENT"]


@torch.library.custom_op("torchq_compat::quantized_recurrent", mutates_args=())
def _quantized_recurrent(
    x: Tensor, states: list[Tensor], weights: list[Tensor], cells: str, batch_first: bool
) -> list[Tensor]:
    """Run all layers and directions of a module.

    Args:
        x: (T, B, I), float32.
        states: (B, width) each: the states of the first cell, of the second, and so on.
        weights: the weights that the graphs in ``cells`` read, in the order of the graphs.
        cells: JSON: a list of layers, each a list of one or two directions, each a list of one or two graphs.
            The last graph is the cell, (x, *states) -> new states; a graph before it computes the cell's x.
        batch_first: whether x is a view of a tensor that the caller passed as (B, T, I).

    Returns:
        The output (T, B, P) of every direction of the last layer; the last states in the order of ``states``.
    """
    rows, owned = iter(states), iter(weights)
    outputs: list[Tensor] = []
    last: list[Tensor] = []
    for depth, layer in enumerate(_read(cells)):
        outputs = []
        for index, direction in enumerate(layer):
            state = tuple(next(rows) for _ in range(direction.state_count))
            step, inputs = direction.hoisted(x, owned, batch_first=batch_first and not depth)
            output, new = run_looped_direction(step, inputs, state, backward=index == 1)
            outputs.append(output)
            last.extend(new)
        x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
    return [*outputs, *last]


@_quantized_recurrent.register_fake
def _quantized_recurrent_fake(
    x: Tensor, states: list[Tensor], weights: list[Tensor], cells: str, batch_first: bool
) -> list[Tensor]:
    last_layer = _read(cells)[-1]
    count = last_layer[0].state_count
    hidden = states[::count][-len(last_layer) :]
    outputs = [x.new_empty(x.shape[0], *each.shape) for each in hidden]
    return [*outputs, *(torch.empty_like(each) for each in states)]


QUANTIZED_RECURRENT = torch.ops.torchq_compat.quantized_recurrent.default


@dataclass(frozen=True)
class _Direction:
    """One direction of one layer as the operator runs it: functions, and the names of their weights."""

    before: Function | None
    before_weights: tuple[str, ...]
    functions: CellFunctions
    weights: tuple[str, ...]
    state_count: int

    @classmethod
    def of(cls, graphs: list[dict[str, Any]]) -> _Direction:
        *before, cell = [_owned(graph_from_data(data)) for data in graphs]
        return cls(
            before=call_on(*before[0]) if before else None,
            before_weights=tuple(before[0][0]) if before else (),
            functions=CellFunctions.of(*cell),
            weights=tuple(cell[0]),
            state_count=len(graphs[-1]["inputs"]) - 1,
        )

    def hoisted(
        self, x: Tensor, weights: Iterator[Tensor], *, batch_first: bool
    ) -> tuple[Function, tuple[Tensor, ...]]:
        """Return the function of one time step, and its inputs at all steps; consumes its part of
        ``weights``."""
        if self.before is not None:
            (x,) = self.before(_owner(self.before_weights, weights), x)
        owner = _owner(self.weights, weights)
        inputs = project_as_given(partial(self.functions.project, owner), x, batch_first=batch_first)
        return partial(self.functions.step_of_constants, owner, *self.functions.constants(owner)), inputs


@lru_cache(maxsize=64)
def _read(cells: str) -> tuple[tuple[_Direction, ...], ...]:
    return tuple(tuple(_Direction.of(graphs) for graphs in layer) for layer in json.loads(cells))


def _owned(graph: Graph) -> tuple[dict[str, Any], Graph]:
    """Return placeholder tensors for the weights that ``graph`` reads, in order, and ``graph``."""
    return {str(node.target): torch.empty(0) for node in graph.find_nodes(op="get_attr")}, graph


def _owner(names: tuple[str, ...], weights: Iterator[Tensor]) -> SimpleNamespace:
    return SimpleNamespace(**{name: next(weights) for name in names})
