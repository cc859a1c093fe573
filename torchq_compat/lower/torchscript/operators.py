"""TorchScript forms of the Python functions of a captured graph and of q-dq operators.

``quantized_decomposed`` is implemented in Python: a process that only loads TorchScript lacks it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchq_compat.read import qdq

ATEN = torch.ops.aten

#: Function of the graph -> an expression of its arguments.
TEMPLATES: Mapping[Any, str] = {
    operator.add: "({0} + {1})",
    operator.sub: "({0} - {1})",
    operator.mul: "({0} * {1})",
    operator.truediv: "({0} / {1})",
    operator.floordiv: "({0} // {1})",
    operator.mod: "({0} % {1})",
    operator.pow: "({0} ** {1})",
    operator.neg: "(-{0})",
    operator.eq: "({0} == {1})",
    operator.ne: "({0} != {1})",
    operator.lt: "({0} < {1})",
    operator.le: "({0} <= {1})",
    operator.gt: "({0} > {1})",
    operator.ge: "({0} >= {1})",
    operator.and_: "({0} and {1})",
    operator.or_: "({0} or {1})",
    operator.getitem: "{0}[{1}]",
    torch.sym_float: "float({0})",
    torch.sym_int: "int({0})",
    torch.sym_not: "(not {0})",
    torch.sym_max: "max({0}, {1})",
    torch.sym_min: "min({0}, {1})",
    torch.sym_ite: "({1} if {0} else {2})",
    math.ceil: "math.ceil({0})",
    math.floor: "math.floor({0})",
    math.trunc: "int({0})",
    round: "round({0})",
    ATEN.sym_size.int: "{0}.size({1})",
    ATEN.sym_stride.int: "{0}.stride({1})",
    ATEN.sym_numel.default: "{0}.numel()",
    ATEN.sym_storage_offset.default: "{0}.storage_offset()",
}
#: Functions whose results, if they compute sizes, are already valid as a float argument.
INT_FLOAT = (operator.truediv, torch.sym_float)


def quantize_per_tensor(
    x: Tensor, scale: float, zero_point: int, quant_min: int, quant_max: int, dtype: int
) -> Tensor:
    return torch.clamp(torch.round(x * (1.0 / scale)) + zero_point, quant_min, quant_max).to(dtype)


def dequantize_per_tensor(
    q: Tensor, scale: float, zero_point: int, quant_min: int, quant_max: int, dtype: int
) -> Tensor:
    return (q.to(torch.float32) - zero_point) * scale


def quantize_per_channel(
    x: Tensor, scales: Tensor, zero_points: Tensor, axis: int, quant_min: int, quant_max: int, dtype: int
) -> Tensor:
    shape = [1] * x.dim()
    shape[axis] = -1
    scaled = torch.round(x * (1.0 / scales.view(shape)))
    return torch.clamp(scaled + zero_points.view(shape), quant_min, quant_max).to(dtype)


def dequantize_per_channel(
    q: Tensor, scales: Tensor, zero_points: Tensor, axis: int, quant_min: int, quant_max: int, dtype: int
) -> Tensor:
    shape = [1] * q.dim()
    shape[axis] = -1
    return ((q - zero_points.view(shape)) * scales.view(shape)).to(torch.float32)


def anew(tensors: list[Tensor], x: Tensor) -> list[Tensor]:
    """Return a list that torch.jit cannot take for a constant, since it depends on ``x``."""
    made: list[Tensor] = []
    for each in tensors:
        if x.numel() >= 0:
            made.append(each)
    return made


def as_float(x: Tensor, scale: float, zero_point: int) -> Tensor:
    return x if x.is_floating_point() else (x.to(torch.float32) - zero_point) * scale


def as_floats(x: Tensor, scales: Tensor, zero_points: Tensor, axis: int) -> Tensor:
    shape = [1] * x.dim()
    shape[axis] = -1
    return (
        x if x.is_floating_point() else ((x - zero_points.view(shape)) * scales.view(shape)).to(torch.float32)
    )


def convert_element_type(x: Tensor, dtype: int) -> Tensor:
    return x.to(dtype)


#: Operator -> the function above that computes its bits.
FUNCTIONS: Mapping[Any, str] = {
    qdq.QUANTIZE: "quantize_per_tensor",
    qdq.DEQUANTIZE: "dequantize_per_tensor",
    qdq.QUANTIZE_PER_CHANNEL: "quantize_per_channel",
    qdq.DEQUANTIZE_PER_CHANNEL: "dequantize_per_channel",
    qdq.CONVERT_DTYPE: "convert_element_type",
}
HELPERS: Mapping[str, Any] = {
    function.__name__: function
    for function in (
        quantize_per_tensor,
        dequantize_per_tensor,
        quantize_per_channel,
        dequantize_per_channel,
        convert_element_type,
        anew,
        as_float,
        as_floats,
    )
}
