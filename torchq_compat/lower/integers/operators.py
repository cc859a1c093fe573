"""The operators of lowered graphs: integers in plain tensors, with their qparams as arguments.

On the CPU they run in C++ (``integer_operators.cpp``), which is built at the first call. If that fails, and
on other devices, the functions below compute the same with torch's operators. They are the specification: C++
computes their bits, but ``mean``, ``convolution`` and ``linear`` may round a tie to the other side.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchq_compat.recurrent.kernel.build import OF_LIBRARY
from torchq_compat.recurrent.kernel.op import OPS, define_operator
from torchq_compat.support.process_state import is_compiling

OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
}
CONVOLUTIONS = {3: torch.conv1d, 4: torch.conv2d, 5: torch.conv3d}
POOLS: dict[int, Any] = {2: torch.max_pool2d, 3: torch.max_pool3d}


def quantize(x: Tensor, scale: float, zero_point: int, low: int, high: int, signed: bool) -> Tensor:
    """Return the integers of floats: ``x / scale + zero_point``, ties to even, between ``low`` and ``high``.

    Formula: ``quantized_decomposed.quantize_per_tensor``, which multiplies by the inverse of the scale.
    """
    integers = torch.clamp(torch.round(x * (1.0 / scale)) + zero_point, low, high)
    return _laid_out(integers.to(torch.int8 if signed else torch.uint8), x)


def dequantize(x: Tensor, scale: float, zero_point: int) -> Tensor:
    """Return the floats of 8-bit integers: ``(x - zero_point) * scale``."""
    return _laid_out((x.to(torch.float32) - zero_point) * scale, x)


def lookup(x: Tensor, table: Tensor, axis: int) -> Tensor:
    """Return the entry of ``table`` for each 8-bit integer of ``x``.

    Args:
        table: (256,), or (C, 256) with a row for each index along ``axis``; the entry for the integer ``i``
            is at ``i % 256``.
        axis: the dimension of ``x``, of C indices; not read if there is one row.
    """
    index = x.view(torch.uint8).to(torch.int64)
    if table.dim() == 2:
        shape = [1] * x.dim()
        shape[axis] = table.shape[0]
        index = index + 256 * torch.arange(table.shape[0], device=x.device).reshape(shape)
    return _laid_out(table.reshape(-1)[index], x)


def arithmetic(
    x: Tensor,
    x_scale: float,
    x_zero_point: int,
    y: Tensor,
    y_scale: float,
    y_zero_point: int,
    operation: str,
    scale: float,
    zero_point: int,
    low: int,
    high: int,
    signed: bool,
) -> Tensor:
    """Return the integers of an operation on two broadcast tensors of 8-bit integers.

    Args:
        operation: one of ``OPERATIONS``.
    """
    floats = dequantize(x, x_scale, x_zero_point), dequantize(y, y_scale, y_zero_point)
    result = quantize(OPERATIONS[operation](*floats), scale, zero_point, low, high, signed)
    like = next((item for item in (x, y) if item.shape == result.shape), None)
    return result.contiguous() if like is None else _laid_out(result, like)


def affine(
    x: Tensor,
    x_scale: float,
    x_zero_point: int,
    weight: Tensor,
    offset: Tensor,
    axis: int,
    scale: float,
    zero_point: int,
    low: int,
    high: int,
    signed: bool,
) -> Tensor:
    """Return the integers of ``x * weight + offset``, with a number of each for each index along ``axis``."""
    shape = [1] * x.dim()
    shape[axis] = -1
    floats = dequantize(x, x_scale, x_zero_point) * weight.reshape(shape) + offset.reshape(shape)
    return _laid_out(quantize(floats, scale, zero_point, low, high, signed), x)


def mean(
    x: Tensor,
    x_scale: float,
    x_zero_point: int,
    dims: Sequence[int],
    keepdim: bool,
    scale: float,
    zero_point: int,
    low: int,
    high: int,
    signed: bool,
) -> Tensor:
    """Return the integers of the means of 8-bit integers over the dimensions ``dims``."""
    floats = dequantize(x, x_scale, x_zero_point).mean(list(dims), keepdim)
    return quantize(floats, scale, zero_point, low, high, signed).contiguous()


def max_pool(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> Tensor:
    """Return the maxima of windows of 8-bit integers over as many last dimensions as ``kernel_size`` has."""
    floats, settings = x.to(torch.float32), [list(kernel_size), list(stride), list(padding), list(dilation)]
    if len(kernel_size) == 1:
        # Of a row of height 1: max_pool1d fixes sizes that torch.export leaves free (torch 2.13).
        settings = [[neutral, *setting] for neutral, setting in zip((1, 1, 0, 1), settings, strict=True)]
        pooled: Tensor = POOLS[2](floats.unsqueeze(-2), *settings, ceil_mode).squeeze(-2).to(x.dtype)
    else:
        pooled = POOLS[len(kernel_size)](floats, *settings, ceil_mode).to(x.dtype)
    channels = x.dim() - len(kernel_size) - 1
    is_last = not x.is_contiguous() and x.movedim(channels, -1).is_contiguous()
    return _channels_last(pooled, channels) if is_last else pooled.contiguous()


def convolution(
    x: Tensor,
    x_scale: float,
    x_zero_point: int,
    weight: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    scale: float,
    zero_point: int,
    low: int,
    high: int,
    result: str,
) -> Tensor:
    """Return the convolution of 8-bit integers, (N, C, \\*spatial).

    Args:
        weight: int8, (O, C / groups, \\*window), with zero points of 0.
        weight_scales: float32, (O,).
        bias: float32, (O,), or None.
        scale, zero_point, low, high: the qparams of the result; not read for ``"float32"``.
        result: ``"uint8"``, ``"int8"`` or ``"float32"``.
    """
    rows = weight_scales.reshape(-1, *[1] * (weight.dim() - 1))
    settings = (list(stride), list(padding), list(dilation), groups)
    floats = CONVOLUTIONS[x.dim()](
        dequantize(x, x_scale, x_zero_point), weight.to(torch.float32) * rows, bias, *settings
    )
    return _channels_last(_result(floats, scale, zero_point, low, high, result), 1)


def linear(
    x: Tensor,
    x_scale: float,
    x_zero_point: int,
    weight: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None,
    scale: float,
    zero_point: int,
    low: int,
    high: int,
    result: str,
) -> Tensor:
    """Return the linear of 8-bit integers, (\\*, K); ``weight`` is int8, (O, K). See ``convolution``."""
    rows = weight.to(torch.float32) * weight_scales[:, None]
    floats = torch.nn.functional.linear(dequantize(x, x_scale, x_zero_point), rows, bias)
    return _result(floats, scale, zero_point, low, high, result).contiguous()


def _laid_out(values: Tensor, like: Tensor) -> Tensor:
    """Return ``values`` in the memory layout of ``like``; contiguous if that has gaps. Compilers trust it."""
    if not torch.ops.aten.is_non_overlapping_and_dense(like):
        return values.contiguous()
    return (
        values
        if values.stride() == like.stride()
        else torch.empty_like(like, dtype=values.dtype).copy_(values)
    )


def _channels_last(values: Tensor, channels: int) -> Tensor:
    """Return ``values`` with the dimension ``channels`` innermost in memory."""
    return values.movedim(channels, -1).contiguous().movedim(-1, channels)


def _result(floats: Tensor, scale: float, zero_point: int, low: int, high: int, result: str) -> Tensor:
    if result == "float32":
        return floats
    return quantize(floats, scale, zero_point, low, high, result == "int8")


def forget_weights(addresses: Sequence[int]) -> None:
    """Drop the packed forms of the weights at these addresses, if there are any."""
    if hasattr(OPS, OF_LIBRARY) and not is_compiling():
        OPS.forget_weights.default(list(addresses))


def _register(function: Callable[..., Tensor], schema: str) -> Any:
    return define_operator(function.__name__, schema, function, function)


QPARAMS = "float scale, int zero_point, int low, int high"
WEIGHTS = "Tensor weight, Tensor weight_scales, Tensor? bias"
X = "Tensor x, float x_scale, int x_zero_point"
QUANTIZE = _register(quantize, f"(Tensor x, {QPARAMS}, bool signed) -> Tensor")
DEQUANTIZE = _register(dequantize, "(Tensor x, float scale, int zero_point) -> Tensor")
LOOKUP = _register(lookup, "(Tensor x, Tensor table, int axis) -> Tensor")
ARITHMETIC = _register(
    arithmetic,
    f"({X}, Tensor y, float y_scale, int y_zero_point, str operation, {QPARAMS}, bool signed) -> Tensor",
)
AFFINE = _register(affine, f"({X}, Tensor weight, Tensor offset, int axis, {QPARAMS}, bool signed) -> Tensor")
MEAN = _register(mean, f"({X}, int[] dims, bool keepdim, {QPARAMS}, bool signed) -> Tensor")
WINDOWS = "int[] stride, int[] padding, int[] dilation"
MAX_POOL = _register(max_pool, f"(Tensor x, int[] kernel_size, {WINDOWS}, bool ceil_mode) -> Tensor")
CONVOLUTION = _register(
    convolution, f"({X}, {WEIGHTS}, {WINDOWS}, int groups, {QPARAMS}, str result) -> Tensor"
)
LINEAR = _register(linear, f"({X}, {WEIGHTS}, {QPARAMS}, str result) -> Tensor")
