"""ONNX translations of operators that torch translates otherwise, and of dynamic LSTMs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from onnxscript import evaluator, ir
from onnxscript import opset21 as op
from onnxscript.onnx_types import TensorType
from torch.fx import Graph, Node

from torchq_compat.read import qdq
from torchq_compat.recurrent.exported_op import QUANTIZED_RECURRENT, graph_from_data

# Dynamically quantized LSTMs as ``com.microsoft::DynamicQuantizeLSTM``, one node for each layer.
#
# ONNX Runtime's operator quantizes the input and the hidden state step by step over the whole range of
# uint8, and computes gates and states in floats; ``torch.ao.nn.quantized.dynamic.LSTM`` does so over half
# of the range. Its weights are (directions, inputs, 4H) with the gates in ONNX's order: input, output,
# forget, cell.
#
# The module needs onnxscript: import it through ``packages``.


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
        inputs, recurrent = ([member[index] for member in linears] for index in range(2))
        hidden, cell = (_stacked([_unsqueezed(pair[index]) for pair in pairs]) for index in range(2))
        biases = _stacked([op.Concat(i.bias, r.bias, axis=1) for i, r in zip(inputs, recurrent, strict=True)])
        y, last_hidden, last_cell = _dynamic_quantize_lstm(
            x,
            *(_stacked([entry.weight for entry in side]) for side in (inputs, recurrent)),
            biases,
            None,
            hidden,
            cell,
            None,
            *(
                _stacked([getattr(element, name) for element in side])
                for side in (inputs, recurrent)
                for name in ("scale", "zero_point")
            ),
            direction="bidirectional" if len(layer) == 2 else "forward",
            hidden_size=int(pairs[0][0].shape[-1]),
        )
        outputs = [_at(y, index, 1) for index in range(len(layer))]
        x = outputs[0] if len(outputs) == 1 else op.Concat(*outputs, axis=-1)
        last += [_at(item, index, 0) for index in range(len(layer)) for item in (last_hidden, last_cell)]
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
        qparams = [op.Unsqueeze(_in_onnx_order(item), _axes(0)) for item in (scales, zeros)]
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


# ONNX translations of operators for which torch's own translation computes something else or is missing.
#
# - A quantize to a part of its dtype's range is clipped first: QuantizeLinear saturates at the dtype's
#   bounds.
# - int32, the dtype of 16-bit parts, has no QuantizeLinear: it is computed in floats, as torch computes it.
# - Float zero points, of embeddings, have no DequantizeLinear.
# - Dynamic qparams are chosen in the graph, as ``choose_qparams`` chooses them.
# - A linear of floats by integers is a Gemm: ONNX Runtime turns a MatMul there into MatMulNBits, which
#   rounds
#   the floats to 8 bits (34 to 43 dB in an LSTM of two bidirectional layers).
# - A bias is subtracted from a MatMul: ONNX Runtime would turn an Add or a Gemm into QGemm, which rounds the
#   bias to integers (42 dB in that LSTM, 36 dB in a loop around a GRUCell).
#
# The module needs onnxscript: import it through ``packages``.


#: The dtypes that QuantizeLinear has, and their ranges.
RANGES = {
    ir.DataType.UINT8: (0, 255),
    ir.DataType.INT8: (-128, 127),
    ir.DataType.UINT16: (0, 65535),
    ir.DataType.INT16: (-32768, 32767),
}
#: The largest float32 that fits into an int32.
LARGEST = 2147483520


def _float(value: float) -> Any:
    return op.Constant(value=ir.tensor(float(value), dtype=ir.DataType.FLOAT))


def _integer(value: int, dtype: int) -> Any:
    return op.Constant(value=ir.tensor(int(value), dtype=ir.DataType(dtype)))


def _shape(*sizes: int) -> Any:
    return op.Constant(value=ir.tensor(list(sizes), dtype=ir.DataType.INT64))


def quantize_per_tensor(
    input: TensorType, scale: float, zero_point: int, quant_min: int, quant_max: int, dtype: int
) -> TensorType:
    whole = RANGES.get(ir.DataType(dtype))
    if whole is None:
        scaled = op.Add(op.Round(op.Mul(input, _float(1.0 / scale))), _float(zero_point))
        clipped = op.Clip(scaled, _float(max(quant_min, -(2**31))), _float(min(quant_max, LARGEST)))
        return op.Cast(clipped, to=dtype)
    if (quant_min, quant_max) != whole:
        low, high = ((bound - zero_point) * scale for bound in (quant_min, quant_max))
        input = op.Clip(input, _float(low), _float(high))
    return op.QuantizeLinear(input, _float(scale), _integer(zero_point, dtype))


def dequantize_per_tensor(
    input: TensorType,
    scale: float,
    zero_point: int,
    quant_min: int,
    quant_max: int,
    dtype: int,
    out_dtype: int = -1,
) -> TensorType:
    if ir.DataType(dtype) in RANGES:
        result = op.DequantizeLinear(input, _float(scale), _integer(zero_point, dtype))
    else:
        floats = op.Cast(input, to=ir.DataType.FLOAT)
        result = op.Mul(op.Sub(floats, _float(zero_point)), _float(scale))
    return result if out_dtype in (-1, None) else op.Cast(result, to=out_dtype)


def quantize_by_tensors(
    input: TensorType,
    scale: TensorType,
    zero_point: TensorType,
    quant_min: int,
    quant_max: int,
    dtype: int,
) -> TensorType:
    inverse = op.Reciprocal(op.Cast(scale, to=ir.DataType.FLOAT))
    shift = op.Cast(zero_point, to=ir.DataType.FLOAT)
    scaled = op.Add(op.Round(op.Mul(input, inverse)), shift)
    return op.Cast(op.Clip(scaled, _float(quant_min), _float(quant_max)), to=dtype)


def dequantize_by_tensors(
    input: TensorType,
    scale: TensorType,
    zero_point: TensorType,
    quant_min: int,
    quant_max: int,
    dtype: int,
    out_dtype: int = -1,
) -> TensorType:
    shift = op.Cast(zero_point, to=ir.DataType.FLOAT)
    shifted = op.Sub(op.Cast(input, to=ir.DataType.FLOAT), shift)
    return op.Mul(shifted, op.Cast(scale, to=ir.DataType.FLOAT))


def choose_qparams(
    input: TensorType, quant_min: int, quant_max: int, eps: float, dtype: int
) -> tuple[TensorType, TensorType]:
    zero = _float(0.0)
    low = op.Min(op.ReduceMin(input, keepdims=0), zero)
    high = op.Max(op.ReduceMax(input, keepdims=0), zero)
    scale = op.Max(op.Div(op.Sub(high, low), _float(quant_max - quant_min)), _float(eps))
    shift = op.Sub(_float(quant_min), op.Round(op.Div(low, scale)))
    zero_point = op.Clip(shift, _float(quant_min), _float(quant_max))
    return op.Cast(scale, to=ir.DataType.DOUBLE), op.Cast(zero_point, to=ir.DataType.INT64)


def dequantize_per_channel(
    input: TensorType,
    scales: TensorType,
    zero_points: TensorType,
    axis: int,
    quant_min: int,
    quant_max: int,
    dtype: int,
    out_dtype: int = -1,
) -> TensorType:
    scales = op.Cast(scales, to=ir.DataType.FLOAT)
    if _is_float(zero_points) or ir.DataType(dtype) not in RANGES:
        shape = [1] * len(input.shape)
        shape[axis] = -1
        shift = op.Reshape(op.Cast(zero_points, to=ir.DataType.FLOAT), _shape(*shape))
        floats = op.Cast(input, to=ir.DataType.FLOAT)
        result = op.Mul(op.Sub(floats, shift), op.Reshape(scales, _shape(*shape)))
    else:
        result = op.DequantizeLinear(input, scales, op.Cast(zero_points, to=dtype), axis=axis)
    return result if out_dtype in (-1, None) else op.Cast(result, to=out_dtype)


def quantize_per_channel(
    input: TensorType,
    scales: TensorType,
    zero_points: TensorType,
    axis: int,
    quant_min: int,
    quant_max: int,
    dtype: int,
) -> TensorType:
    shape = [1] * len(input.shape)
    shape[axis] = -1
    s, z = (op.Reshape(op.Cast(item, to=ir.DataType.FLOAT), _shape(*shape)) for item in (scales, zero_points))
    low, high = (op.Mul(op.Sub(_float(bound), z), s) for bound in (quant_min, quant_max))
    clipped = op.Min(op.Max(input, low), high)
    return op.QuantizeLinear(
        clipped, op.Cast(scales, to=ir.DataType.FLOAT), op.Cast(zero_points, to=dtype), axis=axis
    )


def convert_element_type(input: TensorType, dtype: int) -> TensorType:
    return op.Cast(input, to=dtype)


def linear(input: TensorType, weight: TensorType, bias: TensorType | None = None) -> TensorType:
    rank = len(input.shape)
    is_integer, has_integers = (_is_result_of(item, "DequantizeLinear") for item in (input, weight))
    if rank == 2 and (bias is None or not (is_integer and has_integers)):
        return (
            op.Gemm(input, weight, bias, transB=1) if bias is not None else op.Gemm(input, weight, transB=1)
        )
    if rank <= 2 or is_integer or not has_integers:
        product = op.MatMul(input, op.Transpose(weight, perm=[1, 0]))
        return product if bias is None else op.Sub(product, op.Neg(bias))
    rows = op.Reshape(input, op.Concat(_shape(-1), op.Shape(input, start=rank - 1), axis=0))
    result = op.Gemm(rows, weight, bias, transB=1) if bias is not None else op.Gemm(rows, weight, transB=1)
    return op.Reshape(result, op.Concat(op.Shape(input, end=rank - 1), _shape(-1), axis=0))


def _is_result_of(value: Any, op_type: str) -> bool:
    producer = value.producer()
    return producer is not None and producer.op_type == op_type


def _is_float(value: Any) -> bool:
    return value.dtype is not None and value.dtype.is_floating_point()


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    qdq.QUANTIZE: quantize_per_tensor,
    qdq.DEQUANTIZE: dequantize_per_tensor,
    qdq.QUANTIZE_DYNAMIC: quantize_by_tensors,
    qdq.DEQUANTIZE_DYNAMIC: dequantize_by_tensors,
    qdq.CHOOSE_QPARAMS: choose_qparams,
    qdq.QUANTIZE_PER_CHANNEL: quantize_per_channel,
    qdq.DEQUANTIZE_PER_CHANNEL: dequantize_per_channel,
    qdq.CONVERT_DTYPE: convert_element_type,
    torch.ops.aten.linear.default: linear,
    QUANTIZED_RECURRENT: quantized_recurrent,
}
