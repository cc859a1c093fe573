"""Operators that only move data: the one table of them.

Every result is a value of the input, or zero, which all qparams can hold. So the result has the qparams of
the input without rounding, and the kernels of ATen run on quantized tensors as they are.

Legacy: FX's copy nodes and tensor shape nodes, whose dequantize and quantize it takes away.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch.fx import Node

__all__ = ["PASSTHROUGH", "preserves_values"]

ATEN = torch.ops.aten


def _always(node: Node) -> bool:
    return True


def _pads_with_values(node: Node) -> bool:
    """Return whether it pads with reflected values or zeros. Quantized tensors have no kernels for other
    modes."""
    mode, value = _argument(node, 2, "mode", "constant"), _argument(node, 3, "value", None)
    return mode == "reflect" or (mode == "constant" and not value)


def _drops_nothing(node: Node) -> bool:
    """Return whether a dropout is in evaluation, where it is the identity."""
    return _argument(node, 2, "train", None) is False


#: Operator -> whether a call of it only moves data.
PASSTHROUGH: dict[object, Callable[[Node], bool]] = {
    **dict.fromkeys(
        (
            operator.getitem,
            ATEN.alias.default,
            ATEN.channel_shuffle.default,
            ATEN.chunk.default,
            ATEN.clone.default,
            ATEN.contiguous.default,
            ATEN.detach.default,
            ATEN.expand.default,
            ATEN.flatten.using_ints,
            ATEN.index_select.default,
            ATEN.max_pool1d.default,
            ATEN.max_pool2d.default,
            ATEN.max_pool3d.default,
            ATEN.narrow.default,
            ATEN.permute.default,
            ATEN.pixel_shuffle.default,
            ATEN.pixel_unshuffle.default,
            ATEN.relu.default,
            ATEN.repeat.default,
            ATEN.repeat_interleave.self_int,
            ATEN.reshape.default,
            ATEN.select.int,
            ATEN.slice.Tensor,
            ATEN.split.Tensor,
            ATEN.squeeze.default,
            ATEN.squeeze.dim,
            ATEN.squeeze.dims,
            ATEN.stack.default,
            ATEN.t.default,
            ATEN.transpose.int,
            ATEN.unflatten.int,
            ATEN.unsqueeze.default,
            ATEN.view.default,
        ),
        _always,
    ),
    ATEN.dropout.default: _drops_nothing,
    ATEN.pad.default: _pads_with_values,
}


def preserves_values(node: Node) -> bool:
    """Return whether the results of ``node`` are values of its inputs, or zero."""
    return node.target in PASSTHROUGH and PASSTHROUGH[node.target](node)


def _argument(node: Node, position: int, name: str, default: object) -> object:
    return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)
