"""A node of ``aten.lstm.input``, read: what torch.export leaves of an ``nn.LSTM``.

Signature: ``(input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first)``, with
the parameters in the order of ``nn.LSTM._flat_weights``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from torchq_compat.errors import AtenLSTMError

__all__ = ["LSTM_OP", "AtenLSTM", "Direction", "aten_lstms"]

LSTM_OP = torch.ops.aten.lstm.input


@dataclass(frozen=True)
class Direction:
    """One direction of one layer: its place and its parameters.

    ``parameters`` are get_attr nodes by the names of ``nn.LSTM`` without the suffix: weight_ih, weight_hh,
    bias_ih, bias_hh, weight_hr.
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
        """Where its cell stands inside the LSTM."""
        return f"layers.{self.layer}.{self.name}.cell"

    def values(self, graph_module: GraphModule) -> dict[str, Tensor]:
        """Return the parameters themselves.

        Raises:
            AtenLSTMError: a parameter that is computed in the graph, or is not float32.
        """
        return {name: _value(graph_module, node) for name, node in self.parameters.items()}


@dataclass(frozen=True)
class AtenLSTM:
    """The arguments of one node. ``x`` is (T, B, I), or (B, T, I) with ``batch_first``; ``h0`` is (L*D, B, P)
    and ``c0`` (L*D, B, H)."""

    node: Node
    x: Node
    h0: Node
    c0: Node
    directions: tuple[Direction, ...]
    num_layers: int
    dropout: float
    bidirectional: bool
    batch_first: bool

    @classmethod
    def of(cls, node: Node) -> AtenLSTM:
        """Read ``node``, which calls ``LSTM_OP``."""
        arguments: Any = node.args
        x, (h0, c0), parameters, has_biases, num_layers, dropout, train, bidirectional, batch_first = (
            arguments
        )
        return cls(
            node=node,
            x=x,
            h0=h0,
            c0=c0,
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


def aten_lstms(graph_module: GraphModule) -> list[AtenLSTM]:
    """Return every ``aten.lstm.input`` of the graph, in order."""
    return [AtenLSTM.of(node) for node in graph_module.graph.nodes if node.target is LSTM_OP]


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
            f"parameter {node.name!r} of the LSTM is computed in the graph ({node.target}).",
            hint="the parts own copies of the weights; remove parametrizations before torch.export.",
        )
    path, _, name = str(node.target).rpartition(".")
    owner: nn.Module = graph_module.get_submodule(path)
    value: Tensor = getattr(owner, name)
    if value.dtype is not torch.float32:
        raise AtenLSTMError(
            f"parameter {node.name!r} of the LSTM is {value.dtype}.",
            hint="quantize a float32 model: model.float() before torch.export.",
        )
    return value
