"""Dynamically quantized LSTMs as ``com.microsoft::DynamicQuantizeLSTM``, one node for each layer.

ONNX Runtime's operator quantizes the input and the hidden state step by step over the whole range of uint8,
and computes gates and states in floats; ``torch.ao.nn.quantized.dynamic.LSTM`` does so over half of the
range. Its weights are (directions, inputs, 4H) with the gates in ONNX's order: input, output, forget, cell.

The module needs onnxscript: import it through ``packages``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from onnxscript import evaluator, ir
from onnxscript import opset21 as op
from onnxscript.onnx_types import TensorType
from torch.fx import Graph, Node

from torchq_compat.custom_modules.recurrent.exported_op.graph_text import graph_from_data

__all__ = ["DOMAIN", "quantized_recurrent"]

DOMAIN = "com.microsoft"
LINEAR = torch.ops.aten.linear.default
#: The positions in torch's stacked gates (input, forget, cell, output), in ONNX's order.
GATE_ORDER = (0, 3, 1, 2)


@dataclass(frozen=True)
class _Linear:
    """The weight of one projection of one direction, in the layout of the operator.

    Attributes:
        weight: (1, inputs, 4H), integers.
        scale, zero_point: (1,) or (1, 4H).
        bias: (1, 4H).
    """

    weight: Any
    scale: Any
    zero_point: Any
    bias: Any


def quantized_recurrent(
    x: TensorType,
    states: Sequence[TensorType],
    weights: Sequence[TensorType],
    cells: str,
    batch_first: bool,
) -> Sequence[TensorType]:
    """Translate ``torchq_compat::quantized_recurrent`` for LSTMs with dynamic qparams; ``batch_first``
    changes no number."""
    owned, rows = iter(weights), iter(states)
    outputs: list[Any] = []
    last: list[Any] = []
    for layer in json.loads(cells):
        linears = [[_read(graph, owned) for graph in direction] for direction in layer]
        pairs = [(next(rows), next(rows)) for _ in layer]
        inputs, recurrent = ([each[index] for each in linears] for index in range(2))
        hidden, cell = (_stacked([_unsqueezed(pair[index]) for pair in pairs]) for index in range(2))
        biases = _stacked([op.Concat(i.bias, r.bias, axis=1) for i, r in zip(inputs, recurrent, strict=True)])
        y, last_hidden, last_cell = _dynamic_quantize_lstm(
            x,
            *(_stacked([each.weight for each in side]) for side in (inputs, recurrent)),
            biases,
            None,
            hidden,
            cell,
            None,
            *(
                _stacked([getattr(each, name) for each in side])
                for side in (inputs, recurrent)
                for name in ("scale", "zero_point")
            ),
            direction="bidirectional" if len(layer) == 2 else "forward",
            hidden_size=int(pairs[0][0].shape[-1]),
        )
        outputs = [_at(y, index, 1) for index in range(len(layer))]
        x = outputs[0] if len(outputs) == 1 else op.Concat(*outputs, axis=-1)
        last += [_at(each, index, 0) for index in range(len(layer)) for each in (last_hidden, last_cell)]
    return [*outputs, *last]


def _dynamic_quantize_lstm(*inputs: Any, direction: str, hidden_size: int) -> Sequence[Any]:
    """Return (output, last hidden state, last cell state); onnxscript has no schema of the operator."""
    node = ir.node(
        "DynamicQuantizeLSTM",
        inputs=list(inputs),
        attributes={"direction": direction, "hidden_size": hidden_size},
        domain=DOMAIN,
        num_outputs=3,
    )
    evaluator.default().nodes.append(node)
    outputs: Sequence[Any] = node.outputs
    return outputs


def _read(data: dict[str, Any], weights: Iterator[Any]) -> _Linear:
    """Return the one linear of a cell's graph; consumes its part of ``weights``."""
    graph = graph_from_data(data)
    value_of = {name: next(weights) for name in data["weights"]}
    linear = _linear_of(graph)
    dequantize = linear.args[1]
    assert isinstance(dequantize, Node)
    integers, scale, zero_point = dequantize.args[:3]
    weight = value_of[str(integers.target)]  # type: ignore[union-attr]
    gates = weight.shape[0]
    if isinstance(scale, Node):
        scales = op.Cast(value_of[str(scale.target)], to=ir.DataType.FLOAT)
        zeros = op.Cast(value_of[str(zero_point.target)], to=ir.DataType.INT8)  # type: ignore[union-attr]
        qparams = [op.Unsqueeze(_in_onnx_order(each), _axes(0)) for each in (scales, zeros)]
    else:
        qparams = [
            op.Constant(value=ir.tensor([scale], dtype=ir.DataType.FLOAT)),
            op.Constant(value=ir.tensor([zero_point], dtype=ir.DataType.INT8)),
        ]
    bias = linear.args[2] if len(linear.args) > 2 else None
    if isinstance(bias, Node):
        biases = op.Unsqueeze(_in_onnx_order(value_of[str(bias.target)]), _axes(0))
    else:
        biases = op.Constant(value=ir.tensor([[0.0] * int(gates)], dtype=ir.DataType.FLOAT))
    transposed = op.Transpose(_in_onnx_order(weight), perm=[1, 0])
    scales_of, zeros_of = qparams
    return _Linear(op.Unsqueeze(transposed, _axes(0)), scales_of, zeros_of, biases)


def _linear_of(graph: Graph) -> Node:
    (linear,) = graph.find_nodes(op="call_function", target=LINEAR)
    assert isinstance(linear, Node)
    return linear


def _in_onnx_order(gates: Any) -> Any:
    """Return ``gates``, split by gate in the first dimension, in ONNX's order."""
    size = int(gates.shape[0]) // len(GATE_ORDER)
    parts = [op.Slice(gates, _axes(i * size), _axes((i + 1) * size), _axes(0)) for i in GATE_ORDER]
    return op.Concat(*parts, axis=0)


def _stacked(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else op.Concat(*values, axis=0)


def _unsqueezed(value: Any) -> Any:
    return op.Unsqueeze(value, _axes(0))


def _at(value: Any, index: int, axis: int) -> Any:
    return op.Gather(value, op.Constant(value=ir.tensor(index, dtype=ir.DataType.INT64)), axis=axis)


def _axes(*axes: int) -> Any:
    return op.Constant(value=ir.tensor(list(axes), dtype=ir.DataType.INT64))
