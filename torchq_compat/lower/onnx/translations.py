"""ONNX translations of operators that torch translates otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from onnxscript import ir
from onnxscript import opset21 as op
from onnxscript.onnx_types import TensorType

from torchq_compat.read import qdq

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
}
