"""Convolutions with int8 weights on 8-bit activations. Legacy: ``nnq.Conv2d`` and related modules."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from torchq_compat.lower.integers.lowered_graph import Family, Kernel, LoweredGraph, Refusal, of_result
from torchq_compat.lower.integers.operators import CONVOLUTION
from torchq_compat.lower.integers.qdq_graph import Integers, OpSite, constant_of, integers_at, rank_of
from torchq_compat.ops import those
from torchq_compat.read.qdq import DEQUANTIZE, is_dequantize

# Convolutions on which oneDNN's kernels never return: recognized by shape, since a trial would hang as well.
#
# Found on one x86 CPU with torch 2.13, by running the packed op that FX calls: depthwise, 16 channels,
# stride 1 and a window of 14 or more along the last dimension, in cases with 29 results or more. oneDNN may
# block fewer channels at a time on other CPUs, so fewer channels and every length are included here.


MOST_CHANNELS = 16
LEAST_WINDOW = 14


def may_never_return(weight: Sequence[int], settings: tuple[Any, ...]) -> bool:
    """Return whether oneDNN may hang on a convolution.

    Args:
        weight: the shape of its weight, (output channels, input channels per group, \\*window).
        settings: the settings it is packed with: stride, padding, dilation, groups.
    """
    if len(weight) < 3:
        return False
    stride, groups = settings[0], settings[-1]
    is_depthwise = weight[1] == 1 and 1 < groups <= MOST_CHANNELS
    return is_depthwise and weight[-1] >= LEAST_WINDOW and stride[-1] == 1


# Constant int8 weights of linear layers and convolutions, and what the kernels need beside them.


#: For a result in floats, which has no qparams.
NO_QPARAMS = (1.0, 0, 0, 0)


@dataclass(frozen=True)
class Weight:
    """A constant int8 weight, symmetric, per tensor or for each output channel.

    Attributes:
        values: the node of the int8 values.
        tensor: the values.
        scales: the node of the scales; None: they are ``numbers``.
        numbers: the scales, of shape (O,).
    """

    values: Node
    tensor: Tensor
    scales: Node | None
    numbers: Tensor

    def write_scales(self, lowered: LoweredGraph) -> Node:
        return lowered.constant(self.numbers) if self.scales is None else self.scales


def weight_of(site: OpSite, axis: int = 0) -> Weight | Refusal | None:
    """Return the weight of the op at ``site``; None if it is not quantized.

    Args:
        axis: the dimension of the output channels.
    """
    dequantize = site.arguments["weight"]
    if not is_dequantize(dequantize):
        return None
    values = constant_of(site.graph_module, dequantize.args[0])
    if values is None or values.dtype is not torch.int8:
        return Refusal("its weight is no constant of int8")
    channels = values.shape[axis]
    if dequantize.target is DEQUANTIZE:
        scale, zero_point = dequantize.args[1:3]
        numbers, zero_points, node = torch.full((channels,), float(scale)), torch.tensor(zero_point), None
    else:
        scales, result = (constant_of(site.graph_module, arg) for arg in dequantize.args[1:3])
        if scales is None or result is None or dequantize.args[3] != axis:
            return Refusal("its weight has scales along another dimension than its results")
        numbers, zero_points = scales.to(torch.float32), result
        node = dequantize.args[1] if scales.dtype is torch.float32 else None
    if bool(zero_points.any()):
        return Refusal("its weight has zero points, the kernel's is symmetric")
    return Weight(dequantize.args[0], values, node, numbers)


def bias_fault(site: OpSite) -> Refusal | None:
    bias = site.constant("bias")
    if bias is None and site.arguments["bias"] is not None:
        return Refusal("its bias is no constant")
    if bias is not None and bias.dtype is not torch.float32:
        return Refusal(f"its bias is {bias.dtype}, the kernel takes torch.float32")
    return None


def ends(site: OpSite) -> tuple[tuple[float, int, int, int], str]:
    """Return the qparams and the kind of the result as the operators take them."""
    qparams = site.result.qparams
    if qparams is None:
        return NO_QPARAMS, "float32"
    *_, is_signed = numbers = of_result(qparams)
    return numbers[:-1], "int8" if is_signed else "uint8"


# Convolutions with int8 weights on 8-bit activations. Legacy: ``nnq.Conv2d`` and related modules.


ATEN = torch.ops.aten
NEVER_RETURNS = "oneDNN's kernel was seen never to return on such a depthwise convolution"


def _convolution(site: OpSite) -> Kernel | Refusal | None:
    weight = weight_of(site)
    if not isinstance(weight, Weight):
        return weight
    padding = _padding(site, weight.tensor)
    if isinstance(padding, Refusal):
        return padding
    stride, dilation, groups = (site.arguments[name] for name in ("stride", "dilation", "groups"))
    source = _source(site, weight.tensor.dim())
    if isinstance(source, Refusal):
        return source
    rank = weight.tensor.dim() - 2
    settings = (*(per_dimension(setting, rank) for setting in (stride, padding, dilation)), groups)
    if may_never_return(tuple(weight.tensor.shape), settings):
        return Refusal(NEVER_RETURNS, warn=True)

    def write(lowered: LoweredGraph) -> Node:
        numbers, kind = ends(site)
        parts = (weight.values, weight.write_scales(lowered), site.arguments["bias"])
        return lowered.call(CONVOLUTION, *source.arguments, *parts, *settings, *numbers, kind)

    return Kernel(str(CONVOLUTION), write)


def _source(site: OpSite, rank: int) -> Integers | Refusal:
    source = integers_at(site.arguments["input"])
    if source is None:
        return Refusal("its input is not quantized per tensor to 8 bits")
    if rank_of(site.op) != rank:
        return Refusal("the kernel takes batched inputs only")
    return bias_fault(site) or source


def per_dimension(setting: Any, rank: int) -> list[Any]:
    """Return a setting for each dimension."""
    listed = list(setting) if isinstance(setting, (list, tuple)) else [setting]
    return listed * rank if len(listed) == 1 else listed


def _padding(site: OpSite, weight: Tensor) -> Sequence[int] | Refusal:
    """Return the padding as numbers, ``"same"`` and ``"valid"`` too."""
    padding = site.arguments["padding"]
    if not isinstance(padding, str):
        return per_dimension(padding, weight.dim() - 2)
    if padding == "valid":
        return [0] * (weight.dim() - 2)
    dilation = per_dimension(site.arguments["dilation"], weight.dim() - 2)
    expected = [d * (size - 1) for d, size in zip(dilation, weight.shape[2:], strict=True)]
    if any(total % 2 for total in expected):
        return Refusal("it pads one side more than the other")
    return [total // 2 for total in expected]


def _transposed(site: OpSite) -> Kernel | Refusal | None:
    """Return a transposed convolution as an ordinary one: of its input with zeros between the values, by the
    weight turned around."""
    weight = weight_of(site, axis=1)
    if not isinstance(weight, Weight):
        return weight
    rank, groups = weight.tensor.dim() - 2, site.arguments["groups"]
    source = _source(site, rank + 2)
    if isinstance(source, Refusal):
        return source
    names = ("stride", "padding", "output_padding", "dilation")
    stride, padding, more, dilation = (per_dimension(site.arguments[name], rank) for name in names)
    reach = [d * (size - 1) for d, size in zip(dilation, weight.tensor.shape[2:], strict=True)]
    # Behind each value, the last one too, stand stride - 1 zeros.
    edges = [(r - p, r - p + m - (s - 1)) for r, p, m, s in zip(reach, padding, more, stride, strict=True)]
    turned = _turned(weight.tensor, groups)
    # A scale for each output channel of a group; the groups share them.
    scales = weight.numbers.repeat(groups)

    def write(lowered: LoweredGraph) -> Node:
        numbers, kind = ends(site)
        zero = source.qparams.zero_point
        x = _spread(lowered, source.node, stride, zero)
        flat = [number for pair in reversed(edges) for number in pair]
        if any(flat):
            x = lowered.call(ATEN.constant_pad_nd.default, x, flat, zero)
        parts = (lowered.constant(turned), lowered.constant(scales), site.arguments["bias"])
        settings = ([1] * rank, [0] * rank, dilation, groups)
        return lowered.call(CONVOLUTION, x, source.qparams.scale, zero, *parts, *settings, *numbers, kind)

    return Kernel(str(CONVOLUTION), write, note="with zeros between the values of its input")


def _turned(weight: Tensor, groups: int) -> Tensor:
    """Return (I, O / groups, \\*window) as (O, I / groups, \\*window), the window turned around."""
    inputs, outputs, *window = weight.shape
    grouped = weight.reshape(groups, inputs // groups, outputs, *window).transpose(1, 2)
    return grouped.reshape(groups * outputs, inputs // groups, *window).flip(list(range(2, weight.dim())))


def _spread(lowered: LoweredGraph, x: Node, stride: Sequence[int], zero: int) -> Node:
    """Write ``stride - 1`` zeros behind each value of ``x``, along each spatial dimension."""
    for axis, step in enumerate(stride, 2):
        if step == 1:
            continue
        # (..., size, *rest) -> (..., size, step, *rest) -> (..., size * step, *rest)
        apart = lowered.call(ATEN.unsqueeze.default, x, axis + 1)
        behind = [0, 0] * (len(stride) + 1 - axis) + [0, step - 1]
        padded = lowered.call(ATEN.constant_pad_nd.default, apart, behind, zero)
        x = lowered.call(ATEN.flatten.using_ints, padded, axis, axis + 1)
    return x


CONVOLUTIONS = Family(
    {**dict.fromkeys(those("convolution"), _convolution), **dict.fromkeys(those("transposed"), _transposed)}
)
