"""Hides batch norms from torchao while it prepares or converts; this package fuses, folds or keeps them.

torchao's convert looks for its QAT patterns if there is any batch norm: it exports 96 patterns and matches
each, 17 seconds for a model of one batch norm (qat_utils.py, _fold_conv_bn_qat). Fused batch norms are folded
before; see ``batch_norm.fold``.
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
    """Replace every batch norm of ``graph_module`` by a call that torchao does not recognize."""
    _replace(graph_module, BATCH_NORM, kept_batch_norm)


def hide_unfoldable_batch_norms(graph_module: GraphModule) -> None:
    """Hide the batch norms that torchao's prepare must not fold; see ``unfoldable_batch_norms``."""
    for node in unfoldable_batch_norms(graph_module):
        node.target = kept_batch_norm


def show_batch_norms(graph_module: GraphModule) -> None:
    """Undo ``hide_batch_norms`` and ``hide_unfoldable_batch_norms``."""
    _replace(graph_module, kept_batch_norm, BATCH_NORM)


class ShowingBatchNorms(WrappingQuantizer):
    """A Quantizer that first restores the batch norms that were hidden while torchao folded the others."""

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        show_batch_norms(model)
        return super().transform_for_annotation(model)


class HidingBatchNorms(WrappingQuantizer):
    """A Quantizer that hides the batch norms after ``quantizer`` has annotated: torchao's prepare for QAT
    would fuse them next, with default constants."""

    def annotate(self, model: GraphModule) -> GraphModule:
        annotated = super().annotate(model)
        hide_batch_norms(annotated)
        return annotated


def kept_batch_norm(*args: object) -> Tensor:
    """Compute ``aten.batch_norm``; a target that torchao does not recognize."""
    result: Tensor = BATCH_NORM(*args)
    return result


def _replace(graph_module: GraphModule, target: object, replacement: object) -> None:
    replaced = [node for node in graph_module.graph.nodes if node.target is target]
    for node in replaced:
        node.target = replacement
    if replaced:
        graph_module.recompile()
