"""Where torch's kernels read a quantized tensor by a wrong memory layout, and the copy that prevents it.

A tensor of batch 1 behind ``transpose`` and ``reshape``, or ``unsqueeze``, has a stride of the batch that no
layout gives it. These kernels take it for channels-last to read it and for contiguous to write their result,
which is thereby permuted (torch 2.13, and FX's lowered models too); an image of 1 by 1 pixel likewise. What a
convolution returns, and a copy to channels-last, are told apart.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from torchq_compat.qspecs.qdq import DEQUANTIZE, QUANTIZE

__all__ = ["CLONE", "has_own_layout", "layout_read", "reads_by_layout"]

ATEN = torch.ops.aten
CLONE = ATEN.clone.default
#: Rank -> the memory format in which kernels take a tensor for what it is.
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
POOLS = frozenset(
    {
        ATEN.adaptive_avg_pool1d.default,
        ATEN.adaptive_avg_pool2d.default,
        ATEN.adaptive_avg_pool3d.default,
        ATEN.avg_pool1d.default,
        ATEN.avg_pool2d.default,
        ATEN.avg_pool3d.default,
        ATEN.max_pool1d.default,
        ATEN.max_pool2d.default,
        ATEN.max_pool3d.default,
        ATEN.upsample_bilinear2d.vec,
        ATEN.upsample_nearest2d.vec,
        ATEN.upsample_nearest3d.vec,
    }
)
NORMS = frozenset({"quantized.group_norm.default", "quantized.instance_norm.default"})
#: Ops whose results have the layout of their inputs, or one of their own.
KEEPS_LAYOUT = POOLS | {
    ATEN.add.Tensor,
    ATEN.add_.Tensor,
    ATEN.batch_norm.default,
    ATEN.cat.default,
    ATEN.clamp.default,
    ATEN.dropout.default,
    ATEN.elu.default,
    ATEN.gelu.default,
    ATEN.hardsigmoid.default,
    ATEN.hardswish.default,
    ATEN.hardswish_.default,
    ATEN.hardtanh.default,
    ATEN.hardtanh_.default,
    ATEN.leaky_relu.default,
    ATEN.leaky_relu_.default,
    ATEN.mul.Tensor,
    ATEN.prelu.default,
    ATEN.relu.default,
    ATEN.relu_.default,
    ATEN.relu6.default,
    ATEN.sigmoid.default,
    ATEN.silu.default,
    ATEN.silu_.default,
    ATEN.tanh.default,
}


def reads_by_layout(kernel: object) -> bool:
    """Return whether ``kernel`` may mistake the memory layout of its input."""
    return kernel in POOLS or str(kernel) in NORMS


def layout_read(rank: int | None) -> dict[str, Any]:
    """Return the keywords of the clone that is read as what it is."""
    return {"memory_format": FORMATS.get(rank or 0, torch.contiguous_format)}


def has_own_layout(node: Node) -> bool:
    """Return whether ``node`` of the reference graph has the layout of a convolution's result. An input of
    the model or a view may have any."""
    waiting, seen = [node], {node}
    while waiting:
        each = waiting.pop()
        if each.op != "call_function":
            return False
        if str(each.target).startswith("aten.conv"):
            continue
        if each.target not in KEEPS_LAYOUT and each.target not in (QUANTIZE, DEQUANTIZE):
            return False
        sources = each.all_input_nodes if each.target in KEEPS_LAYOUT else each.all_input_nodes[:1]
        found = [source for source in sources if source.op != "get_attr"]
        waiting.extend(source for source in found if source not in seen)
        seen.update(found)
    return True
