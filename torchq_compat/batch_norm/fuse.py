"""Batch norms behind a convolution or linear in QAT, trained as FX's ``nn.intrinsic.qat`` modules train them.

FX fuses the pair, so that training sees the weight that will be quantized, the folded one:

    s = gamma / sqrt(var + eps);  bn(op(x, fq(w * s)) / s + b)

torchao's prepare for QAT does this for conv1d and conv2d, with limits: eps and momentum become the defaults
(qat_utils.py matches with literals ignored), padding by name and inputs that a custom module quantized do not
work, and float pairs are rewritten too. So batch norms are hidden from torchao, and fused here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Argument

from torchq_compat.batch_norm.nodes import EPS, GAMMA, RUNNING_VAR, batch_norm_nodes
from torchq_compat.capture.training_modes import has_fixed_mode, training_flag
from torchq_compat.support.upstream import is_activation_post_process

__all__ = ["OUTPUT_DIMENSIONS", "TRANSPOSED", "fuse_batch_norms"]

ATEN = torch.ops.aten
#: Op -> the number of dimensions its output must have for the batch norm behind it to normalize the op's
#: output channels.
OUTPUT_DIMENSIONS: dict[object, int] = {
    ATEN.linear.default: 2,  # with more, linear and batch norm use different dimensions (pytorch/ao#4116)
    ATEN.conv1d.default: 3,
    ATEN.conv1d.padding: 3,
    ATEN.conv2d.default: 4,
    ATEN.conv2d.padding: 4,
    ATEN.conv3d.default: 5,
    ATEN.conv3d.padding: 5,
    ATEN.conv_transpose1d.default: 3,
    ATEN.conv_transpose2d.input: 4,
    ATEN.conv_transpose3d.input: 5,
}
TRANSPOSED = (ATEN.conv_transpose1d.default, ATEN.conv_transpose2d.input, ATEN.conv_transpose3d.input)


@dataclass(frozen=True)
class _Pair:
    """An op whose only user is a batch norm, and the fake-quantize of its weight."""

    op: Node
    weight_fake_quantize: Node
    batch_norm: Node

    @property
    def weight(self) -> Node:
        weight = self.weight_fake_quantize.args[0]
        assert isinstance(weight, Node)
        return weight

    @property
    def weight_axis(self) -> int:
        """The axis of the output channels."""
        return 1 if self.op.target in TRANSPOSED else 0

    @property
    def weight_shape(self) -> list[int]:
        return list(self.weight.meta["val"].shape)

    @property
    def channels(self) -> int:
        gamma = self.batch_norm.args[GAMMA]
        assert isinstance(gamma, Node)
        return int(gamma.meta["val"].numel())


def fuse_batch_norms(prepared: GraphModule) -> None:
    """Fuse every such pair in ``prepared``, a QAT graph with its fake-quantizes, in place."""
    for _, node in list(batch_norm_nodes(prepared)):
        pair = _match(prepared, node)
        if pair is not None:
            _rewrite(prepared, pair)
    prepared.recompile()


def _match(prepared: GraphModule, batch_norm: Node) -> _Pair | None:
    op = batch_norm.args[0]
    if not isinstance(op, Node) or len(op.users) != 1 or batch_norm.args[GAMMA] is None:
        return None
    if has_fixed_mode(batch_norm) and training_flag(batch_norm):
        # The batch norm uses the statistics of the batch in evaluation too, so there is nothing to fold.
        return None
    if op.target not in OUTPUT_DIMENSIONS or OUTPUT_DIMENSIONS[op.target] != op.meta["val"].dim():
        return None
    fake_quantize = op.args[1]
    if not isinstance(fake_quantize, Node) or fake_quantize.op != "call_module":
        return None
    if not is_activation_post_process(prepared.get_submodule(str(fake_quantize.target))):
        return None
    if len(fake_quantize.users) != 1:
        # A weight with other users cannot be scaled for this batch norm alone.
        return None
    pair = _Pair(op, fake_quantize, batch_norm)
    # The weight of a grouped transposed convolution has no axis with all output channels.
    return pair if pair.weight_shape[pair.weight_axis] == pair.channels else None


def _rewrite(prepared: GraphModule, pair: _Pair) -> None:
    graph, op = prepared.graph, pair.op
    bias, options = op.args[2] if len(op.args) > 2 else None, op.args[3:]
    scale = _scale(graph, pair)
    op.args = (op.args[0], _scaled_weight(graph, pair, scale), None, *options)
    graph.erase_node(pair.weight_fake_quantize)
    shape = [1, -1, *[1] * (OUTPUT_DIMENSIONS[op.target] - 2)]
    with graph.inserting_before(pair.batch_norm):
        source = graph.call_function(ATEN.div.Tensor, (op, _reshaped(graph, scale, shape)))
        if bias is not None:
            source = graph.call_function(ATEN.add.Tensor, (source, _reshaped(graph, bias, shape)))
    pair.batch_norm.update_arg(0, source)


def _scale(graph: Graph, pair: _Pair) -> Node:
    """Return ``gamma / sqrt(var + eps)``, with the statistics before they are updated by the batch."""
    gamma, variance, eps = (pair.batch_norm.args[i] for i in (GAMMA, RUNNING_VAR, EPS))
    with graph.inserting_before(pair.op):
        variance_with_eps = graph.call_function(ATEN.add.Tensor, (variance, eps))
        deviation = graph.call_function(ATEN.sqrt.default, (variance_with_eps,))
        return graph.call_function(ATEN.div.Tensor, (gamma, deviation))


def _scaled_weight(graph: Graph, pair: _Pair, scale: Node) -> Node:
    """Return a call of the weight's fake-quantize on the weight times ``scale``."""
    shape = [-1 if axis == pair.weight_axis else 1 for axis in range(len(pair.weight_shape))]
    with graph.inserting_before(pair.op):
        scaled = graph.call_function(ATEN.mul.Tensor, (pair.weight, _reshaped(graph, scale, shape)))
        # Error messages take the module path from here.
        scaled.meta["nn_module_stack"] = pair.op.meta.get("nn_module_stack")
        return graph.node_copy(pair.weight_fake_quantize, lambda _: scaled)


def _reshaped(graph: Graph, vector: Argument, shape: list[int]) -> Node:
    return graph.call_function(ATEN.reshape.default, (vector, shape))
