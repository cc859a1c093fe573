"""A converted recurrent module as one operator with readable cells,
``torchq_compat::quantized_recurrent``.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from torchq_compat.read.qdq import NAMESPACE
from torchq_compat.read.qparams import q_dq
from torchq_compat.recurrent.cell_graph import CellFunctions, CellGraphModule, Function, call_on
from torchq_compat.recurrent.over_time import State, project_as_given, run_looped_direction
from torchq_compat.support.dtypes import dtype_name, dtype_named

# Converts a graph of operator calls to plain data for JSON, and back.
#
# The data is stored inside an exported program. It has no code, only names of operators and their arguments.


#: The namespaces of operators that a text may call.
NAMESPACES = ("aten", NAMESPACE)
GETITEM = "getitem"


def graph_to_data(graph: Graph) -> dict[str, Any]:
    """Return ``graph`` as data: ``weights``, the attributes it reads; ``inputs``; ``nodes``, each (name,
    operator, args, kwargs), in order; ``results``. A value of the graph is ``{"value": name}``, a dtype
    ``{"dtype": name}``.

    A weight has the name of its node, because a path with dots cannot be the name of an attribute.
    """
    return {
        "weights": [node.name for node in graph.find_nodes(op="get_attr")],
        "inputs": [node.name for node in graph.find_nodes(op="placeholder")],
        "nodes": [
            [node.name, _operator_name(node), _to_data(node.args), _to_data(dict(node.kwargs))]
            for node in graph.nodes
            if node.op == "call_function"
        ],
        "results": _to_data(graph.output_node().args[0]),
    }


def graph_from_data(data: Mapping[str, Any]) -> Graph:
    """Return the graph that ``graph_to_data`` wrote as ``data``.

    Raises:
        ValueError: if an operator is not in ``NAMESPACES``.
    """
    graph = Graph()
    values: dict[str, Node] = {}
    for name in data["inputs"]:
        values[name] = graph.placeholder(name)
    for name in data["weights"]:
        values[name] = graph.get_attr(name)
    for name, operator_name, args, kwargs in data["nodes"]:
        arguments = tuple(_from_data(args, values)), _from_data(kwargs, values)
        values[name] = graph.call_function(_operator(operator_name), *arguments)
    graph.output(tuple(_from_data(data["results"], values)))
    return graph


def _operator_name(node: Node) -> str:
    return GETITEM if node.target is operator.getitem else str(node.target)


def _operator(name: str) -> Any:
    if name == GETITEM:
        return operator.getitem
    namespace, packet, overload = name.split(".")
    if namespace not in NAMESPACES:
        raise ValueError(f"the operator {name} is none of {', '.join(NAMESPACES)}")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def _to_data(argument: Any) -> Any:
    if isinstance(argument, Node):
        return {"value": argument.name}
    if isinstance(argument, torch.dtype):
        return {"dtype": dtype_name(argument)}
    if isinstance(argument, (tuple, list)):
        return [_to_data(item) for item in argument]
    if isinstance(argument, dict):
        return {key: _to_data(value) for key, value in argument.items()}
    return argument


def _from_data(data: Any, values: Mapping[str, Node]) -> Any:
    if isinstance(data, list):
        return [_from_data(item, values) for item in data]
    if not isinstance(data, dict):
        return data
    if "value" in data:
        return values[data["value"]]
    if "dtype" in data:
        return dtype_named(data["dtype"])
    return {key: _from_data(value, values) for key, value in data.items()}


# A converted recurrent module as one operator with readable cells, ``torchq_compat::quantized_recurrent``.
#
# It is used when a program is translated to another format, and when a cell has no program for the native
# operator. Its arguments describe the module completely: the weights, and the cells as a text
# (``graph_text``), from which a backend with its own recurrent kernel reads every part and its qparams. It
# computes the same bits as the converted module.


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
    outputs = [x.new_empty(x.shape[0], *item.shape) for item in hidden]
    return [*outputs, *(torch.empty_like(state) for state in states)]


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


# Calls of the opaque operator with converted cells, in an export that requests them.


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
        [[graph_to_data(item.graph) for item in direction.graphs()] for direction in layer]
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
