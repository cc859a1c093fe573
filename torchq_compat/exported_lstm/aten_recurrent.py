"""Reads the recurrent operators of an exported program, which torch.export writes for LSTM, GRU and RNN.

Signature of ``aten.lstm.input``, ``aten.gru.input``, ``aten.rnn_tanh.input`` and ``aten.rnn_relu.input``:
``(input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first)``, with the
parameters in the order of ``_flat_weights``; ``hx`` is a list of two tensors for LSTM, else one tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from torchq_compat.custom_modules.recurrent.cell.kinds import GRU, LSTM, RNN_RELU, RNN_TANH, CellKind
from torchq_compat.errors import AtenLSTMError

__all__ = ["LSTM_OP", "RECURRENT_OPS", "AtenRecurrent", "Direction", "aten_recurrents", "refuse_packed"]

ATEN = torch.ops.aten
LSTM_OP = ATEN.lstm.input
KINDS: dict[Any, CellKind] = {
    LSTM_OP: LSTM,
    ATEN.gru.input: GRU,
    ATEN.rnn_tanh.input: RNN_TANH,
    ATEN.rnn_relu.input: RNN_RELU,
}
RECURRENT_OPS: tuple[Any, ...] = tuple(KINDS)
#: The operators of a PackedSequence, whose batch sizes are data.
PACKED_OPS = (ATEN.lstm.data, ATEN.gru.data, ATEN.rnn_tanh.data, ATEN.rnn_relu.data)


@dataclass(frozen=True)
class Direction:
    """One direction of one layer: its position and its parameters.

    ``row`` is its row in the states. ``parameters`` are get_attr nodes by their names in ``torch.nn`` without
    the suffix: weight_ih, weight_hh, bias_ih, bias_hh, weight_hr.
    """

    layer: int
    backward: bool
    row: int
    parameters: dict[str, Node]

    @property
    def name(self) -> str:
        """The name of the direction inside its layer: ``layer_fw`` or ``layer_bw``."""
        return "layer_bw" if self.backward else "layer_fw"

    @property
    def path(self) -> str:
        """The path of its cell inside the module."""
        return f"layers.{self.layer}.{self.name}.cell"

    def values(self, graph_module: GraphModule) -> dict[str, Tensor]:
        """Return the tensors of the parameters, by name.

        Raises:
            AtenLSTMError: if a parameter is computed in the graph, or is not float32.
        """
        return {name: _value(graph_module, node) for name, node in self.parameters.items()}


@dataclass(frozen=True)
class AtenRecurrent:
    """The arguments of one node that calls a recurrent operator.

    Attributes:
        kind: the kind of its cells.
        x: (T, B, I), or (B, T, I) with ``batch_first``.
        states: (L*D, B, width) each, the hidden state first.
    """

    node: Node
    kind: CellKind
    x: Node
    states: tuple[Node, ...]
    directions: tuple[Direction, ...]
    num_layers: int
    dropout: float
    bidirectional: bool
    batch_first: bool

    @classmethod
    def of(cls, node: Node) -> AtenRecurrent:
        """Read ``node``, which calls one of ``RECURRENT_OPS``."""
        arguments: Any = node.args
        x, hx, parameters, has_biases, num_layers, dropout, train, bidirectional, batch_first = arguments
        return cls(
            node=node,
            kind=KINDS[node.target],
            x=x,
            states=tuple(hx) if isinstance(hx, (tuple, list)) else (hx,),
            directions=tuple(_directions(list(parameters), has_biases, num_layers, bidirectional)),
            num_layers=num_layers,
            dropout=dropout if train else 0.0,
            bidirectional=bidirectional,
            batch_first=batch_first,
        )

    def layers(self) -> Iterator[tuple[Direction, ...]]:
        """Yield the directions of each layer."""
        width = 2 if self.bidirectional else 1
        for first in range(0, len(self.directions), width):
            yield self.directions[first : first + width]


def aten_recurrents(
    graph_module: GraphModule, operators: Collection[Any] = RECURRENT_OPS
) -> list[AtenRecurrent]:
    """Return every call of ``operators`` in the graph, in order."""
    return [AtenRecurrent.of(node) for node in graph_module.graph.nodes if node.target in operators]


def refuse_packed(graph_module: GraphModule) -> None:
    """Check that a graph has no operator of a PackedSequence.

    Raises:
        AtenLSTMError: if it has; names the first.
    """
    for node in graph_module.graph.nodes:
        if node.target in PACKED_OPS:
            raise AtenLSTMError(
                f"node {node.name!r} is {node.target}, a recurrent operator of a PackedSequence: "
                "its batch sizes are data, so its steps cannot be told apart.",
                hint="export the model with padded sequences; outside an exported program a prepared module "
                "of torchq_compat.nn.quantizable takes a PackedSequence.",
            )


def _directions(
    parameters: list[Node], has_biases: bool, num_layers: int, bidirectional: bool
) -> Iterator[Direction]:
    rows = num_layers * (2 if bidirectional else 1)
    names = ["weight_ih", "weight_hh", *(["bias_ih", "bias_hh"] if has_biases else [])]
    count = len(parameters) // rows
    if count > len(names):
        names.append("weight_hr")
    for row in range(rows):
        mine = parameters[row * count : (row + 1) * count]
        yield Direction(
            layer=row // 2 if bidirectional else row,
            backward=bidirectional and row % 2 == 1,
            row=row,
            parameters=dict(zip(names, mine, strict=True)),
        )


def _value(graph_module: GraphModule, node: Node) -> Tensor:
    if node.op != "get_attr":
        raise AtenLSTMError(
            f"parameter {node.name!r} is computed in the graph ({node.target}).",
            hint="the parts own copies of the weights; remove parametrizations before torch.export.",
        )
    path, _, name = str(node.target).rpartition(".")
    owner: nn.Module = graph_module.get_submodule(path)
    value: Tensor = getattr(owner, name)
    if value.dtype is not torch.float32:
        raise AtenLSTMError(
            f"parameter {node.name!r} is {value.dtype}.",
            hint="quantize a float32 model: model.float() before torch.export.",
        )
    return value
