"""Means over dimensions of a quantized tensor, and pools of one average. Legacy: FX calls ATen's kernels on
quantized tensors, which keep the qparams of the input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from torchq_compat.lower.integers.lowered_graph import LoweredGraph, is_signed, numbers_of
from torchq_compat.lower.integers.operators import MEAN
from torchq_compat.lower.integers.qdq_graph import Site, integers_at
from torchq_compat.lower.integers.rules.rule import Family, Kernel, Refusal, Rule

__all__ = ["FAMILY"]

ATEN = torch.ops.aten


def _rule(dims_of: Callable[[dict[str, Any]], Sequence[int] | None]) -> Rule:
    def rule(site: Site) -> Kernel | Refusal | None:
        source, qparams = integers_at(site.arguments["self"]), site.result.qparams
        if source is None or qparams is None or site.arguments.get("dtype") is not None:
            return Refusal("its input and its result are not both quantized per tensor to 8 bits")
        dims = dims_of(site.arguments)
        if dims is None:
            return Refusal("it has no integer kernel for more than one average")

        def write(lowered: LoweredGraph) -> Node:
            x = (source.node, source.qparams.scale, source.qparams.zero_point)
            keeps = bool(site.arguments.get("keepdim", True))
            return lowered.call(MEAN, *x, list(dims), keeps, *numbers_of(qparams), is_signed(qparams))

        return Kernel(str(MEAN), write)

    return rule


def _of_pool(arguments: dict[str, Any]) -> Sequence[int] | None:
    sizes = arguments["output_size"]
    return [index - len(sizes) for index in range(len(sizes))] if all(size == 1 for size in sizes) else None


POOLS: tuple[Any, ...] = (
    ATEN.adaptive_avg_pool1d.default,
    ATEN.adaptive_avg_pool2d.default,
    ATEN.adaptive_avg_pool3d.default,
)
FAMILY = Family(
    {ATEN.mean.dim: _rule(lambda arguments: arguments["dim"]), **dict.fromkeys(POOLS, _rule(_of_pool))}
)
