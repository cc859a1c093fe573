"""Folds QAT's batch norms into the ops in front of them, before torchao converts.

``batch_norm.fuse`` turned ``bn(op(x, w) + b)`` into

    s = gamma / sqrt(var + eps);  bn(op(x, fq(w * s)) / s + b)

which in evaluation is ``op(x, fq(w * s)) + (b - mean) * s + beta``. torchao folds its own form of this after
conversion by exporting 96 patterns and matching each, for any model: 11 seconds for one convolution. Batch
norms that are not folded here are hidden from torchao.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from torchq_compat.batch_norm.nodes import EPS, batch_norm_nodes
from torchq_compat.support.graph_nodes import attribute_of

__all__ = ["fold_batch_norms"]

ATEN = torch.ops.aten


@dataclass(frozen=True)
class _Fold:
    """One fused batch norm: the nodes of the formula above."""

    batch_norm: Node
    convolution: Node
    weight_observer: Node
    scaled_weight: Node
    bias: Node | None


def fold_batch_norms(prepared: GraphModule) -> None:
    """Fold every fused batch norm of ``prepared``, a QAT graph in evaluation, in place."""
    for _, node in list(batch_norm_nodes(prepared)):
        fold = _match(node)
        if fold is not None:
            _apply(prepared, fold)
    prepared.graph.eliminate_dead_code()
    prepared.delete_all_unused_submodules()
    prepared.recompile()


def _match(batch_norm: Node) -> _Fold | None:
    source, bias = batch_norm.args[0], None
    if _calls(source, ATEN.add.Tensor):
        source, reshaped = source.args[:2]  # type: ignore[union-attr]
        bias = reshaped.args[0] if _calls(reshaped, ATEN.reshape.default) else None  # type: ignore[union-attr]
        if bias is None:
            return None
    if not _calls(source, ATEN.div.Tensor):
        return None
    convolution = source.args[0]  # type: ignore[union-attr]
    observer = convolution.args[1] if isinstance(convolution, Node) and len(convolution.args) > 1 else None
    if not isinstance(observer, Node) or observer.op != "call_module":
        return None
    scaled = observer.args[0]
    if not _calls(scaled, ATEN.mul.Tensor):
        return None
    return _Fold(batch_norm, convolution, observer, scaled, bias)  # type: ignore[arg-type]


def _apply(prepared: GraphModule, fold: _Fold) -> None:
    gamma, beta, mean, variance = (_value(prepared, node) for node in fold.batch_norm.args[1:5])
    eps = fold.batch_norm.args[EPS]
    assert isinstance(eps, float)
    scale = gamma / torch.sqrt(variance + eps)
    weight, reshaped = fold.scaled_weight.args[:2]
    assert isinstance(weight, Node)
    assert isinstance(reshaped, Node)
    shape = reshaped.args[1]
    bias = _value(prepared, fold.bias) if fold.bias is not None else torch.zeros_like(mean)
    # Unique: two convolutions may share a weight, and each folds its own batch norm.
    name = fold.batch_norm.name
    constants = {
        f"{name}_folded": _value(prepared, weight) * scale.reshape(shape),  # type: ignore[arg-type]
        f"{name}_folded_bias": (bias - mean) * scale + beta,
    }
    nodes = []
    with prepared.graph.inserting_before(fold.weight_observer):
        for constant, value in constants.items():
            prepared.register_parameter(constant, nn.Parameter(value.detach()))
            nodes.append(prepared.graph.get_attr(constant))
            nodes[-1].meta["val"] = value
    fold.weight_observer.args = (nodes[0],)
    arguments = fold.convolution.args
    fold.convolution.args = (*arguments[:2], nodes[1], *arguments[3:])
    fold.batch_norm.replace_all_uses_with(fold.convolution)
    prepared.graph.erase_node(fold.batch_norm)


def _calls(node: object, target: object) -> bool:
    return isinstance(node, Node) and node.target is target


def _value(prepared: GraphModule, node: object) -> Tensor:
    assert isinstance(node, Node)
    value = attribute_of(prepared, node)
    assert isinstance(value, Tensor)
    return value
