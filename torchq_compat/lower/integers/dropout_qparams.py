"""Keep the input's qparams behind a dropout: FX's quantized dropout returns the tensor it is given.

In the reference graph of FX, and in ours, the output of a dropout has an observer of its own. Its integer
kernel has no use for it: what follows, up to the next op that computes, is on the steps of the input.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from torchq_compat.annotate.passthrough_ops import preserves_values
from torchq_compat.lower.integers.qdq_graph import tensors_read as tensor_inputs
from torchq_compat.qspecs.qdq import DEQUANTIZE, QUANTIZE
from torchq_compat.qspecs.qparams import PerTensorQParams

__all__ = ["hand_on_through_dropout"]

DROPOUT = torch.ops.aten.dropout.default


def hand_on_through_dropout(reference: GraphModule) -> None:
    """Give what quantizes the output of a dropout the qparams of its input; changed in place."""
    handed_on: set[Node] = set()
    for quantize in reference.graph.nodes:
        if quantize.target is not QUANTIZE or any(user.target is not DEQUANTIZE for user in quantize.users):
            continue
        qparams = _behind_dropout(quantize, handed_on)
        if qparams is not None:
            for node in (quantize, *quantize.users):
                node.args = (node.args[0], qparams.scale, qparams.zero_point, *node.args[3:])
            handed_on.update(quantize.users)
    if handed_on:
        reference.recompile()


def _behind_dropout(quantize: Node, handed_on: set[Node]) -> PerTensorQParams | None:
    """Return the qparams of the integers that a dropout, and only ops that move values, stand before."""
    node, is_behind = quantize.args[0], False
    while isinstance(node, Node) and node.target is not DEQUANTIZE:
        inputs = tensor_inputs(node)
        if not preserves_values(node) or len(inputs) != 1:
            return None
        is_behind = is_behind or node.target is DROPOUT
        (node,) = inputs
    if not isinstance(node, Node) or not (is_behind or node in handed_on):
        return None
    given, own = PerTensorQParams.of_node(node), PerTensorQParams.of_node(quantize)
    is_same_range = (given.dtype, given.quant_min, given.quant_max) == (
        own.dtype,
        own.quant_min,
        own.quant_max,
    )
    return given if is_same_range else None
