"""The table of operators that only move data.

Every value of the result is a value of the input, or zero, which all qparams can represent. So the result has
the qparams of the input without rounding, and ATen's kernels run on quantized tensors unchanged.

Legacy: FX's copy nodes and tensor shape nodes, around which FX removes dequantize and quantize.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch.fx import Node

__all__ = ["PASSTHROUGH", "moved_by", "preserves_values"]

ATEN = torch.ops.aten


def _always(node: Node) -> bool:
    return True


def _pads_with_values(node: Node) -> bool:
    """Return whether ``node`` pads with reflected values or zeros. Quantized tensors have no kernels for
    other modes."""
    mode, value = _argument(node, 2, "mode", "constant"), _argument(node, 3, "value", None)
    return mode == "reflect" or (mode == "constant" and not value)


def _drops_nothing(node: Node) -> bool:
    """Return whether the dropout ``node`` is in evaluation, where it is the identity."""
    return _argument(node, 2, "train", None) is False


#: Operator -> whether a call of it only moves data.
PASSTHROUGH: dict[object, Callable[[Node], bool]] = {
    **dict.fromkeys(
        (
            operator.getitem,
            ATEN.alias.default,
            ATEN.broadcast_to.default,
            ATEN.channel_shuffle.default,
            ATEN.chunk.default,
            ATEN.clone.default,
            ATEN.contiguous.default,
            ATEN.detach.default,
            ATEN.diagonal.default,
            ATEN.expand.default,
            ATEN.flatten.using_ints,
            ATEN.flip.default,
            ATEN.index.Tensor,
            ATEN.index_select.default,
            ATEN.max_pool1d.default,
            ATEN.max_pool2d.default,
            ATEN.max_pool3d.default,
            ATEN.moveaxis.int,
            ATEN.movedim.int,
            ATEN.movedim.intlist,
            ATEN.mT.default,
            ATEN.narrow.default,
            ATEN.numpy_T.default,
            ATEN.permute.default,
            ATEN.pixel_shuffle.default,
            ATEN.pixel_unshuffle.default,
            ATEN.ravel.default,
            ATEN.relu.default,
            ATEN.repeat.default,
            ATEN.repeat_interleave.self_int,
            ATEN.reshape.default,
            ATEN.select.int,
            ATEN.slice.Tensor,
            ATEN.split.sizes,
            ATEN.split.Tensor,
            ATEN.split_with_sizes.default,
            ATEN.squeeze.default,
            ATEN.squeeze.dim,
            ATEN.squeeze.dims,
            ATEN.stack.default,
            ATEN.swapaxes.default,
            ATEN.swapdims.default,
            ATEN.t.default,
            ATEN.tensor_split.sections,
            ATEN.tile.default,
            ATEN.transpose.int,
            ATEN.unbind.int,
            ATEN.unflatten.int,
            ATEN.unfold.default,
            ATEN.unsqueeze.default,
            ATEN.view.default,
        ),
        _always,
    ),
    ATEN.dropout.default: _drops_nothing,
    ATEN.pad.default: _pads_with_values,
}
#: Operators that select values of their input, and have no kernel on quantized tensors.
CHOOSES = {
    ATEN.amax.default,
    ATEN.amin.default,
    ATEN.gather.default,
    ATEN.masked_select.default,
    ATEN.max.default,
    ATEN.max.dim,
    ATEN.median.dim,
    ATEN.min.default,
    ATEN.min.dim,
    ATEN.roll.default,
    ATEN.sort.default,
    ATEN.take_along_dim.default,
    ATEN.topk.default,
    ATEN.tril.default,
    ATEN.triu.default,
}


def preserves_values(node: Node) -> bool:
    """Return whether all values of the results of ``node`` are values of its inputs, or zero."""
    return node.target in PASSTHROUGH and PASSTHROUGH[node.target](node)


def moved_by(node: Node) -> Node | None:
    """Return the float input whose values, or zero, are the values of all results of ``node``; None if
    ``node`` computes, or joins several inputs."""
    if not (preserves_values(node) or node.target in CHOOSES):
        return None
    given = [each for each in node.all_input_nodes if _holds_floats(each.meta.get("val"))]
    return given[0] if len(given) == 1 else None


def _holds_floats(value: object) -> bool:
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    return isinstance(first, torch.Tensor) and first.dtype.is_floating_point


def _argument(node: Node, position: int, name: str, default: object) -> object:
    return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)
