"""Operators whose output values are input values: they stay on whatever grid the input lies on."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

__all__ = ["preserves_values"]

ATEN = torch.ops.aten
PRESERVING = frozenset(
    {
        operator.getitem,
        ATEN.alias.default,
        ATEN.chunk.default,
        ATEN.clone.default,
        ATEN.contiguous.default,
        ATEN.detach.default,
        ATEN.dropout.default,
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
        ATEN.repeat.default,
        ATEN.repeat_interleave.self_int,
        ATEN.reshape.default,
        ATEN.select.int,
        ATEN.slice.Tensor,
        ATEN.split.Tensor,
        ATEN.squeeze.default,
        ATEN.squeeze.dim,
        ATEN.squeeze.dims,
        ATEN.transpose.int,
        ATEN.unsqueeze.default,
        ATEN.view.default,
    }
)
DROPOUT = ATEN.dropout.default


def preserves_values(node: Node) -> bool:
    """Dropout does in evaluation, where it is the identity."""
    if node.target is DROPOUT:
        return node.args[2] is False
    return node.target in PRESERVING
