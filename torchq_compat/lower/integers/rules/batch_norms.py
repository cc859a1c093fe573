"""Batch norms of a quantized tensor. Legacy: ``nnq.BatchNorm2d``, ``nniq.BNReLU2d`` and the 3d ones."""

from __future__ import annotations

import torch
from torch.fx import Node

from torchq_compat.lower.integers.lowered_graph import LoweredGraph, is_signed, numbers_of
from torchq_compat.lower.integers.operators import AFFINE
from torchq_compat.lower.integers.qdq_graph import Site, integers_at
from torchq_compat.lower.integers.rules.rule import Family, Kernel, Refusal

__all__ = ["FAMILY"]


def _batch_norm(site: Site) -> Kernel | Refusal | None:
    source, qparams = integers_at(site.arguments["input"]), site.result.qparams
    if site.arguments["training"]:
        return Refusal("it normalizes by the statistics of its input")
    if source is None or qparams is None:
        return Refusal("its input and its result are not both quantized per tensor to 8 bits")
    weight, bias, mean, variance = map(site.constant, ("weight", "bias", "running_mean", "running_var"))
    if mean is None or variance is None:
        return Refusal("its statistics are no constants")
    # Formula: torch.nn.BatchNorm2d, as one factor and one offset for each channel.
    factor = torch.rsqrt(variance.double() + site.arguments["eps"])
    factor = factor if weight is None else factor * weight
    offset = -mean * factor if bias is None else bias - mean * factor

    def write(lowered: LoweredGraph) -> Node:
        x = (source.node, source.qparams.scale, source.qparams.zero_point)
        numbers = (lowered.constant(each.to(torch.float32)) for each in (factor, offset))
        return lowered.call(AFFINE, *x, *numbers, 1, *numbers_of(qparams), is_signed(qparams))

    return Kernel(str(AFFINE), write)


FAMILY = Family({torch.ops.aten.batch_norm.default: _batch_norm})
