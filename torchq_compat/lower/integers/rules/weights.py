"""Constant int8 weights of linear layers and convolutions, and what the kernels need beside them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from torchq_compat.lower.integers.lowered_graph import LoweredGraph, numbers_of
from torchq_compat.lower.integers.qdq_graph import Site, constant_of
from torchq_compat.lower.integers.rules.rule import Refusal
from torchq_compat.qspecs.qdq import DEQUANTIZE, is_dequantize

__all__ = ["Weight", "bias_fault", "ends", "weight_of"]

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


def weight_of(site: Site, axis: int = 0) -> Weight | Refusal | None:
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
        scales, found = (constant_of(site.graph_module, each) for each in dequantize.args[1:3])
        if scales is None or found is None or dequantize.args[3] != axis:
            return Refusal("its weight has scales along another dimension than its results")
        numbers, zero_points = scales.to(torch.float32), found
        node = dequantize.args[1] if scales.dtype is torch.float32 else None
    if bool(zero_points.any()):
        return Refusal("its weight has zero points, the kernel's is symmetric")
    return Weight(dequantize.args[0], values, node, numbers)


def bias_fault(site: Site) -> Refusal | None:
    bias = site.constant("bias")
    if bias is None and site.arguments["bias"] is not None:
        return Refusal("its bias is no constant")
    if bias is not None and bias.dtype is not torch.float32:
        return Refusal(f"its bias is {bias.dtype}, the kernel takes torch.float32")
    return None


def ends(site: Site) -> tuple[tuple[float, int, int, int], str]:
    """Return the qparams and the kind of the result as the operators take them."""
    qparams = site.result.qparams
    if qparams is None:
        return NO_QPARAMS, "float32"
    return numbers_of(qparams), "int8" if qparams.dtype.is_signed else "uint8"
