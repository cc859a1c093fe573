"""Batch norms that are fused or kept here, kept out of torchao's sight while it prepares or converts.

torchao's convert looks for its QAT patterns as soon as there is any batch norm: it exports 96 of them and
matches each, 17 seconds for a model of one batch norm (qat_utils.py, _fold_conv_bn_qat). Those that it fused
are folded before; see ``batch_norm.fold``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import GraphModule

from torchq_compat.annotate.wrapping_quantizer import WrappingQuantizer
from torchq_compat.batch_norm.foldable import unfoldable_batch_norms

__all__ = [
    "HidingBatchNorms",
    "ShowingBatchNorms",
    "hide_batch_norms",
    "hide_unfoldable_batch_norms",
    "show_batch_norms",
]

BATCH_NORM = torch.ops.aten.batch_norm.default


def hide_batch_norms(graph_module: GraphModule) -> None:
    """Let every batch norm of ``graph_module`` be a call that torchao does not know."""
    _replace(graph_module, BATCH_NORM, kept_batch_norm)


def hide_unfoldable_batch_norms(graph_module: GraphModule) -> None:
    """Hide those that torchao would fold, when it prepares, although something else reads what it changes."""
    for node in unfoldable_batch_norms(graph_module):
        node.target = kept_batch_norm
    graph_module.recompile()


def show_batch_norms(graph_module: GraphModule) -> None:
    """Undo ``hide_batch_norms``."""
    _replace(graph_module, kept_batch_norm, BATCH_NORM)


class ShowingBatchNorms(WrappingQuantizer):
    """A Quantizer that sees the batch norms again that were hidden while torchao folded the others."""

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        show_batch_norms(model)
        return super().transform_for_annotation(model)


class HidingBatchNorms(WrappingQuantizer):
    """A Quantizer that hides the batch norms as soon as ``quantizer`` has annotated: torchao fuses them next,
    when it prepares for training, with constants of its own."""

    def annotate(self, model: GraphModule) -> GraphModule:
        annotated = super().annotate(model)
        hide_batch_norms(annotated)
        return annotated


def kept_batch_norm(*args: object) -> Tensor:
    """aten.batch_norm under another name."""
    result: Tensor = BATCH_NORM(*args)
    return result


def _replace(graph_module: GraphModule, target: object, replacement: object) -> None:
    for node in graph_module.graph.nodes:
        if node.target is target:
            node.target = replacement
    graph_module.recompile()
