"""Separate the biases of convolutions in models with loops.

ONNX Runtime's optimizer rounds the bias of a quantized convolution to 32-bit integers
(``WeightBiasQuantization``), which changes some of its results by a step. In a feed-forward model that is
little, and worth the integer kernel; before a loop over time each such step changes everything that follows:
29 to 33 dB in a DeepSpeech of GRUs. A bias that is subtracted from the result is not rounded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule

__all__ = ["CONVOLUTIONS", "keep_biases", "with_bias_apart"]

ATEN = torch.ops.aten
SCAN = torch.ops.higher_order.scan
CONVOLUTIONS = (
    ATEN.conv1d.default,
    ATEN.conv1d.padding,
    ATEN.conv2d.default,
    ATEN.conv2d.padding,
    ATEN.conv3d.default,
    ATEN.conv3d.padding,
    ATEN.conv_transpose1d.default,
    ATEN.conv_transpose2d.input,
    ATEN.conv_transpose3d.input,
)


def with_bias_apart(convolution: Any, x: Tensor, weight: Tensor, bias: Tensor, *settings: Any) -> Tensor:
    """Return the result of ``convolution``, with its bias applied by a subtraction."""
    result: Tensor = convolution(x, weight, None, *settings)
    return result - (-bias).reshape(-1, *[1] * (weight.dim() - 2))


def keep_biases(program: ExportedProgram) -> None:
    """Separate the biases of convolutions in a program with loops, in place."""
    graph_module: GraphModule = program.graph_module
    graph = graph_module.graph
    if not graph.find_nodes(op="call_function", target=SCAN):
        return
    for target in CONVOLUTIONS:
        for node in graph.find_nodes(op="call_function", target=target):
            bias = node.args[2] if len(node.args) > 2 else None
            if not isinstance(bias, torch.fx.Node):
                continue
            dimensions = node.meta["val"].dim() - 2
            with graph.inserting_before(node):
                negative = graph.call_function(ATEN.neg.default, (bias,))
                negative.meta["val"] = -bias.meta["val"]
                shaped = graph.call_function(ATEN.reshape.default, (negative, [-1, *[1] * dimensions]))
                shaped.meta["val"] = negative.meta["val"].reshape([-1, *[1] * dimensions])
            with graph.inserting_after(node):
                apart = graph.call_function(ATEN.sub.Tensor, (node, shaped))
            apart.meta = dict(node.meta)
            node.replace_all_uses_with(apart, delete_user_cb=lambda user, apart=apart: user is not apart)
            node.update_arg(2, None)
    graph_module.recompile()
