"""Reads the recurrent operators of an exported program, and writes what replaces them."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torchao.quantization.pt2e.quantizer import Quantizer
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from torchq_compat.annotate.annotation import WrappingQuantizer
from torchq_compat.annotate.sharing import with_points
from torchq_compat.errors import AnnotationError
from torchq_compat.ops import those
from torchq_compat.recurrent.cells import GRU, LSTM, RNN_RELU, RNN_TANH, CellKind
from torchq_compat.support import metadata
from torchq_compat.support.process_state import prepare_pt2e
from torchq_compat.support.upstream import FakeTensorMode

# Reads the recurrent operators of an exported program, which torch.export writes for LSTM, GRU and RNN.
#
# Signature of ``aten.lstm.input``, ``aten.gru.input``, ``aten.rnn_tanh.input`` and ``aten.rnn_relu.input``:
# ``(input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first)``, with the
# parameters in the order of ``_flat_weights``; ``hx`` is a list of two tensors for LSTM, else one tensor.


ATEN = torch.ops.aten
LSTM_OP = ATEN.lstm.input
KINDS: dict[Any, CellKind] = {
    LSTM_OP: LSTM,
    ATEN.gru.input: GRU,
    ATEN.rnn_tanh.input: RNN_TANH,
    ATEN.rnn_relu.input: RNN_RELU,
}


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
    def path(self) -> str:
        """The path of its cell inside the module."""
        return f"layers.{self.layer}.layer_{'bw' if self.backward else 'fw'}.cell"

    def values(self, graph_module: GraphModule) -> dict[str, Tensor]:
        """Return the tensors of the parameters, by name.

        Raises:
            AnnotationError: if a parameter is computed in the graph, or is not float32.
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
        """Read ``node``, which calls one of ``KINDS``."""
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


def aten_recurrents(graph_module: GraphModule, operators: Collection[Any] = KINDS) -> list[AtenRecurrent]:
    """Return every call of ``operators`` in the graph, in order."""
    return [AtenRecurrent.of(node) for node in graph_module.graph.nodes if node.target in operators]


def refuse_packed(graph_module: GraphModule) -> None:
    """Check that a graph has no operator of a PackedSequence.

    Raises:
        AnnotationError: if it has; names the first.
    """
    for node in graph_module.graph.nodes:
        if node.target in those("packed recurrent"):
            raise AnnotationError.of("TQ944.packed", node=node)


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
        raise AnnotationError.of("TQ944.computed_parameter", node=node)
    path, _, name = str(node.target).rpartition(".")
    owner: nn.Module = graph_module.get_submodule(path)
    value: Tensor = getattr(owner, name)
    if value.dtype is not torch.float32:
        raise AnnotationError.of("TQ944.parameter_dtype", node=node, dtype=value.dtype)
    return value


# Plans what a quantizer observes in one cell, and which edges and nodes share an observer.
#
# torchao prepares a copy of the cell with the quantizer, and its callback reports which edge or node got
# which observer. So torchao's sharing rules apply, independent of the graph around the cell.


class EdgeOrNodeName(NamedTuple):
    """An edge or node of a cell, by name, so that it can be found in a copy of the cell.

    ``position`` is an index into the input nodes of ``node``; None means its output.
    """

    node: str
    position: int | None


#: The observed places, in the order in which torchao makes observers: place -> the first place with the same
#: observer, which may be the place itself, and the spec, which refers to places.
CellPlan = dict[EdgeOrNodeName, tuple[EdgeOrNodeName, Any]]


def plan_cell(cell: GraphModule, quantizer: Quantizer) -> CellPlan:
    """Return the plan of what ``quantizer`` observes in ``cell``, which is not changed."""
    recorder = _Recorder(quantizer)
    prepare_pt2e(copy.deepcopy(cell), recorder)
    return recorder.plan


class _Recorder(WrappingQuantizer):
    """Annotates with ``quantizer``, and records the observers that torchao makes from the annotations."""

    plan: CellPlan

    def prepare_obs_or_fq_callback(self, model: GraphModule, observers: dict[Any, Any]) -> None:
        self.plan = {}
        first_with: dict[int, EdgeOrNodeName] = {}
        for point, observer in observers.items():
            if observer is not None:
                place = _place(point)
                leader = first_with.setdefault(id(observer), place)
                self.plan[place] = leader, with_points(_spec(point), _place)


def _place(point: Node | tuple[Node, Node]) -> EdgeOrNodeName:
    if isinstance(point, Node):
        return EdgeOrNodeName(point.name, None)
    source, node = point
    return EdgeOrNodeName(node.name, node.all_input_nodes.index(source))


def _spec(point: Node | tuple[Node, Node]) -> Any:
    if isinstance(point, Node):
        return point.meta[Q_ANNOTATION_KEY].output_qspec
    source, node = point
    return node.meta[Q_ANNOTATION_KEY].input_qspec_map[source]


# Writes nodes that replace another node, with the example values that quantizers inspect.


class NodeWriter:
    """Inserts nodes before the node ``place``, with its origin metadata (module stack, stack trace)."""

    def __init__(self, graph_module: GraphModule, place: Node) -> None:
        self.graph_module = graph_module
        self.graph = graph_module.graph
        self.place = place
        self.fake_mode: FakeTensorMode = place.meta["val"][0].fake_mode

    def call(self, target: Any, *args: Any, value: Any = None, **meta: Any) -> Node:
        """Insert a call of ``target``; ``value`` is its example value, computed if it is not given."""
        with self.graph.inserting_before(self.place):
            node = self.graph.call_function(target, args)
        if value is None:
            with self.fake_mode, torch.no_grad():
                value = target(*map_arg(args, lambda argument: argument.meta["val"]))
        return self._mark(node, value, meta)

    def glue(self, target: Any, *args: Any, value: Any = None) -> Node:
        """Insert a call that only moves values."""
        return self.call(target, *args, value=value, **{metadata.GLUE.name: True})

    def getitem(self, source: Node, index: int) -> Node:
        """Insert a getitem of the result ``index`` of ``source``."""
        return self.glue(operator.getitem, source, index)

    def attribute(self, path: str, value: torch.Tensor) -> Node:
        """Insert a get_attr of the parameter at ``path``, whose value is ``value``."""
        with self.graph.inserting_before(self.place):
            node = self.graph.get_attr(path)
        return self._mark(node, self.fake_mode.from_tensor(value.detach(), static_shapes=True), {})

    def body(self, name: str, module: GraphModule) -> Node:
        """Add the graph ``module`` at the top level under ``name``, and insert a get_attr of it."""
        self.graph_module.add_submodule(name, module)
        with self.graph.inserting_before(self.place):
            return self.graph.get_attr(name)

    def module(self, name: str, module: nn.Module, *args: Node) -> Node:
        """Add ``module`` at the top level under ``name``, and insert a call of it whose results are like
        those of ``place``."""
        self.graph_module.add_submodule(name, module)
        with self.graph.inserting_before(self.place):
            node = self.graph.call_module(name, args)
        return self._mark(node, self.place.meta["val"], {})

    def _mark(self, node: Node, value: Any, meta: dict[str, Any]) -> Node:
        node.meta = {**self.place.meta, **meta, "val": value}
        return node


# Writes layers and directions as nodes around the loop over time, which depends on the shape.
#
# The nodes written here are glue: they select rows of the states, transpose time and batch, and stack
# results.


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
    return output, *(writer.glue(ATEN.stack.default, list(item)) for item in rows)


def flipped(writer: NodeWriter, x: Node) -> Node:
    """Write ``x`` with time reversed, and return the node."""
    return writer.glue(ATEN.flip.default, x, [0])
