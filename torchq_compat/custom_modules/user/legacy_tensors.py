"""Integers on a grid as torch.ao's quantized tensors, the form quantized classes of legacy scripts take."""

from __future__ import annotations

import torch
from torch import Tensor

from torchq_compat.qspecs.qparams import Grid, PerTensorGrid, covering
from torchq_compat.support.upstream import make_per_tensor_quantized_tensor

__all__ = ["has_legacy_dtype", "legacy_tensor"]

LEGACY_DTYPES = (torch.uint8, torch.int8, torch.int32)


def has_legacy_dtype(grid: Grid) -> bool:
    """Whether quantized tensors have a dtype for the integers of ``grid``: quint8, qint8 or qint32."""
    return grid.dtype in LEGACY_DTYPES


def legacy_tensor(q: Tensor, grid: Grid) -> Tensor:
    """The quantized tensor with the integers ``q``.

    Results of several grids (directions of a recurrent module) are quantized again on one that covers all:
    hardly a quantized operator takes per-channel activations.
    """
    if not isinstance(grid, PerTensorGrid):
        whole = covering([piece for _, piece in grid.runs])
        q, grid = whole.quantize(grid.dequantize(q)), whole
    make = make_per_tensor_quantized_tensor
    return make(q, grid.scale, grid.zero_point)
