"""Rows of integer tables: gathered as integers, and dequantized after. Legacy: ``nnq.Embedding``,
``nnq.EmbeddingBag``."""

import torch
from torch.fx import Node

from torchq_compat.lower.integers.lowered_graph import Family, Kernel, LoweredGraph, Refusal
from torchq_compat.lower.integers.qdq_graph import OpSite
from torchq_compat.read.qdq import DEQUANTIZE_PER_CHANNEL, is_dequantize

ATEN = torch.ops.aten


def _rows(lowered: LoweredGraph, weight: Node, indices: Node) -> Node:
    """Write the dequantized rows of the table at ``indices``."""
    values, scales, zero_points = weight.args[:3]
    rows = lowered.call(ATEN.embedding.default, values, indices)
    scale, zero = (
        lowered.call(ATEN.unsqueeze.default, lowered.call(ATEN.index.Tensor, item, [indices]), -1)
        for item in (scales, zero_points)
    )
    difference = lowered.call(ATEN.sub.Tensor, rows, zero)
    return lowered.call(ATEN.to.dtype, lowered.call(ATEN.mul.Tensor, difference, scale), torch.float32)


def _embedding(site: OpSite) -> Kernel | Refusal | None:
    weight, indices = site.arguments["weight"], site.arguments["indices"]
    is_bag = site.op.target is not ATEN.embedding.default
    if not is_dequantize(weight):
        return None
    if weight.target is not DEQUANTIZE_PER_CHANNEL or weight.args[3] != 0:
        return Refusal("its weight has no qparams for each row")
    if is_bag and site.arguments["padding_idx"] is not None:
        return Refusal("it skips an index")

    def write(lowered: LoweredGraph) -> Node:
        rows = _rows(lowered, weight, indices)
        if not is_bag:
            return rows
        count = lowered.call(ATEN.sym_size.int, indices, 0)
        item = lowered.call(ATEN.arange.default, count, device=torch.device("cpu"))
        return lowered.call(site.op.target, rows, item, *site.op.args[2:], **site.op.kwargs)

    return Kernel(f"{ATEN.embedding.default} on integers", write, value=site.op)


FAMILY = Family(dict.fromkeys((ATEN.embedding.default, ATEN.embedding_bag.padding_idx), _embedding))
