"""Convolutions with int8 weights on 8-bit activations. Legacy: ``nnq.Conv2d`` and related modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from torchq_compat.lower.integers.lowered_graph import LoweredGraph
from torchq_compat.lower.integers.operators import CONVOLUTION
from torchq_compat.lower.integers.qdq_graph import Integers, Site, integers_at, rank_of
from torchq_compat.lower.integers.rules.endless_convolutions import may_never_return
from torchq_compat.lower.integers.rules.rule import Family, Kernel, Refusal, Rule
from torchq_compat.lower.integers.rules.weights import Weight, bias_fault, ends, weight_of

__all__ = ["FAMILY"]

ATEN = torch.ops.aten
NEVER_RETURNS = "oneDNN's kernel was seen never to return on such a depthwise convolution"


def _convolution(site: Site) -> Kernel | Refusal | None:
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
    settings = (*(_each(setting, rank) for setting in (stride, padding, dilation)), groups)
    if may_never_return(tuple(weight.tensor.shape), settings):
        return Refusal(NEVER_RETURNS, warn=True)

    def write(lowered: LoweredGraph) -> Node:
        numbers, kind = ends(site)
        x = (source.node, source.qparams.scale, source.qparams.zero_point)
        parts = (weight.values, weight.write_scales(lowered), site.arguments["bias"])
        return lowered.call(CONVOLUTION, *x, *parts, *settings, *numbers, kind)

    return Kernel(str(CONVOLUTION), write)


def _source(site: Site, rank: int) -> Integers | Refusal:
    source = integers_at(site.arguments["input"])
    if source is None:
        return Refusal("its input is not quantized per tensor to 8 bits")
    if rank_of(site.op) != rank:
        return Refusal("the kernel takes batched inputs only")
    return bias_fault(site) or source


def _each(setting: Any, rank: int) -> list[Any]:
    """Return a setting for each dimension."""
    listed = list(setting) if isinstance(setting, (list, tuple)) else [setting]
    return listed * rank if len(listed) == 1 else listed


def _padding(site: Site, weight: Tensor) -> Sequence[int] | Refusal:
    """Return the padding as numbers, ``"same"`` and ``"valid"`` too."""
    padding = site.arguments["padding"]
    if not isinstance(padding, str):
        return _each(padding, weight.dim() - 2)
    if padding == "valid":
        return [0] * (weight.dim() - 2)
    dilation = _each(site.arguments["dilation"], weight.dim() - 2)
    wanted = [d * (size - 1) for d, size in zip(dilation, weight.shape[2:], strict=True)]
    if any(total % 2 for total in wanted):
        return Refusal("it pads one side more than the other")
    return [total // 2 for total in wanted]


def _transposed(site: Site) -> Kernel | Refusal | None:
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
    stride, padding, more, dilation = (_each(site.arguments[name], rank) for name in names)
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
        qparams = (source.qparams.scale, zero)
        return lowered.call(CONVOLUTION, x, *qparams, *parts, *settings, *numbers, kind)

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


CONVOLUTIONS: tuple[Any, ...] = (
    *(ATEN.conv1d.default, ATEN.conv2d.default, ATEN.conv3d.default),
    *(ATEN.conv1d.padding, ATEN.conv2d.padding, ATEN.conv3d.padding),
)
TRANSPOSED: tuple[Any, ...] = (
    ATEN.conv_transpose1d.default,
    ATEN.conv_transpose2d.input,
    ATEN.conv_transpose3d.input,
)
RULES: dict[Any, Rule] = {
    **dict.fromkeys(CONVOLUTIONS, _convolution),
    **dict.fromkeys(TRANSPOSED, _transposed),
}
FAMILY = Family(RULES)
