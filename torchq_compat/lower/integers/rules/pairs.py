"""Ops of several quantized tensors. Legacy: ``torch.ops.quantized.add``, ``mul`` and ``cat``."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from torchq_compat.lower.integers.lowered_graph import LoweredGraph, is_signed, numbers_of
from torchq_compat.lower.integers.operators import ARITHMETIC
from torchq_compat.lower.integers.qdq_graph import Site, integers_at
from torchq_compat.lower.integers.rules.rule import Family, Kernel, Refusal, Rule
from torchq_compat.lower.integers.rules.tables import requantize

__all__ = ["FAMILY"]

ATEN = torch.ops.aten
NOT_QUANTIZED = Refusal("its result is not quantized to 8 bits")


def _rule(operation: str) -> Rule:
    def rule(site: Site) -> Kernel | Refusal | None:
        given = site.op.args[:2]
        if (
            not all(isinstance(each, Node) and each.op != "get_attr" for each in given)
            or given[0] is given[1]
        ):
            return None  # Of one tensor: a table.
        left, right = map(integers_at, given)
        if left is None or right is None:
            return Refusal("its inputs are not both quantized per tensor to 8 bits")
        if site.arguments.get("alpha", 1) != 1:
            return Refusal("the kernel has no alpha")
        qparams = site.result.qparams
        if qparams is None:
            return NOT_QUANTIZED

        def write(lowered: LoweredGraph) -> Node:
            x, y = ((each.node, each.qparams.scale, each.qparams.zero_point) for each in (left, right))
            return lowered.call(ARITHMETIC, *x, *y, operation, *numbers_of(qparams), is_signed(qparams))

        return Kernel(str(ARITHMETIC), write)

    return rule


def _cat(site: Site) -> Kernel | Refusal | None:
    given = site.arguments["tensors"]
    pieces = [integers_at(each) for each in given] if isinstance(given, (list, tuple)) else [None]
    qparams = site.result.qparams
    if any(piece is None for piece in pieces):
        return Refusal("its inputs are not all quantized per tensor to 8 bits")
    if qparams is None:
        return None if len({piece.qparams for piece in pieces if piece}) == 1 else NOT_QUANTIZED

    def write(lowered: LoweredGraph) -> Node:
        moved = [requantize(lowered, piece, qparams) for piece in pieces if piece is not None]
        return lowered.call(site.op.target, moved, site.arguments["dim"])

    return Kernel(f"{site.op.target} on integers", write)


RULES: dict[Any, Rule] = {
    ATEN.add.Tensor: _rule("add"),
    ATEN.sub.Tensor: _rule("sub"),
    ATEN.mul.Tensor: _rule("mul"),
    ATEN.div.Tensor: _rule("div"),
    ATEN.maximum.default: _rule("maximum"),
    ATEN.minimum.default: _rule("minimum"),
    ATEN.cat.default: _cat,
}
FAMILY = Family(RULES)
