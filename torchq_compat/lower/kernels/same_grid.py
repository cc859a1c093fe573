"""Ops of ATen that work on quantized tensors as they are and keep their grid.

Legacy: FX's copy nodes and tensor shape nodes, whose dequantize and quantize it takes away.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from torchq_compat.lower.kernels.kernel import KernelCall, Quantized, Refusal, Rule, Site
from torchq_compat.lower.reading import arguments_of

__all__ = ["CARRIERS", "ROUNDING"]

ATEN = torch.ops.aten


def _always(node: Node) -> bool:
    return True


def _pads_with_values(node: Node) -> bool:
    """Reflected values, or zeros, which every grid has. There are no kernels for other modes."""
    arguments = arguments_of(node)
    return arguments["mode"] == "reflect" or (arguments["mode"] == "constant" and not arguments["value"])


def _drops_nothing(node: Node) -> bool:
    return not arguments_of(node)["train"]


#: Ops whose results are values of their inputs, or zero: on a grid where the inputs are, without rounding.
#: With each, whether a call of it is so.
CARRIERS: dict[Any, Callable[[Node], bool]] = {
    **dict.fromkeys(
        (
            ATEN.view.default,
            ATEN.reshape.default,
            ATEN.flatten.using_ints,
            ATEN.unflatten.int,
            ATEN.squeeze.default,
            ATEN.squeeze.dim,
            ATEN.squeeze.dims,
            ATEN.unsqueeze.default,
            ATEN.permute.default,
            ATEN.transpose.int,
            ATEN.t.default,
            ATEN.slice.Tensor,
            ATEN.select.int,
            ATEN.contiguous.default,
            ATEN.alias.default,
            ATEN.detach.default,
            ATEN.relu.default,
            ATEN.max_pool1d.default,
            ATEN.max_pool2d.default,
            ATEN.max_pool3d.default,
            ATEN.pixel_shuffle.default,
            ATEN.channel_shuffle.default,
            ATEN.stack.default,
        ),
        _always,
    ),
    ATEN.pad.default: _pads_with_values,
    ATEN.dropout.default: _drops_nothing,
}


def _rule(site: Site) -> KernelCall | Refusal | None:
    """The op itself, where its result is quantized to the grid of its input."""
    source = site.op.args[0]
    grid = site.grid_of(source)
    if grid is None or site.grid is None:
        return Refusal("its input and its result are not both quantized to 8 bits")
    if site.relu is not None:
        return Refusal("it has no kernel with a ReLU")
    if site.op.kwargs:
        return Refusal("it is called with settings the kernel does not have")
    if grid != site.grid:
        return Refusal("its result is quantized to another grid than its input")
    assert isinstance(source, Node)
    assert isinstance(site.op.target, torch._ops.OpOverload)
    return KernelCall(site.op.target, (Quantized(source), *site.op.args[1:]), site.covered)


#: Their results are rounded to the grid of the input.
ROUNDING: dict[Any, Rule] = dict.fromkeys(
    (
        ATEN.adaptive_avg_pool1d.default,
        ATEN.adaptive_avg_pool2d.default,
        ATEN.adaptive_avg_pool3d.default,
        ATEN.avg_pool1d.default,
        ATEN.avg_pool2d.default,
        ATEN.avg_pool3d.default,
        ATEN.mean.dim,
        ATEN.hardtanh.default,
        ATEN.relu6.default,
        ATEN.clamp.default,
        ATEN.upsample_nearest2d.vec,
        ATEN.upsample_bilinear2d.vec,
    ),
    _rule,
)
