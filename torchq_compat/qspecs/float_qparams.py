"""Weights with float zero points, FX's scheme for embeddings: their integers are computed here.

quantized_decomposed.quantize_per_channel computes ``round(x / scale) + zero_point`` and truncates the sum to
an integer, up to one step below FX's ``round(x / scale + zero_point)``. So only the dequantize is put into
the graph, by the ``convert`` method of the observer, which torchao's convert calls.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.fake_quantize import FakeQuantize

from torchq_compat.qspecs.qdq import DEQUANTIZE_PER_CHANNEL
from torchq_compat.qspecs.torch_ao_subclasses import recognised_by_torch_ao
from torchq_compat.support.graph_nodes import attribute_of

__all__ = ["FloatQParamsFakeQuantize", "fold_weight"]


@recognised_by_torch_ao
class FloatQParamsFakeQuantize(FakeQuantize):  # type: ignore[misc]
    """torchao's FakeQuantize, which is converted to a folded integer weight."""

    def convert(self, model: GraphModule, observer_node: Node) -> None:
        """Replace ``observer_node``, which observes a weight of ``model``, by a folded integer weight."""
        scale, zero_point = self.calculate_qparams()
        fold_weight(model, observer_node, scale, zero_point, self)


def fold_weight(
    model: GraphModule, observer_node: Node, scale: Tensor, zero_point: Tensor, settings: Any
) -> None:
    """Replace ``observer_node`` by the dequantize of a folded integer weight.

    Args:
        scale: one per channel.
        zero_point: one per channel, as floats.
        settings: has ``ch_axis``, ``quant_min``, ``quant_max`` and ``dtype``.
    """
    source = observer_node.args[0]
    assert isinstance(source, Node)
    name = str(source.target).replace(".", "_")
    weight = attribute_of(model, source).detach()
    axis, low, high = int(settings.ch_axis), int(settings.quant_min), int(settings.quant_max)
    shape = [-1 if i == axis else 1 for i in range(weight.dim())]
    integers = torch.round(weight / scale.view(shape) + zero_point.view(shape)).clamp(low, high)
    constants = {
        f"{name}_quantized": integers.to(settings.dtype),
        f"{name}_scales": scale,
        f"{name}_zero_points": zero_point,
    }
    graph = model.graph
    with graph.inserting_before(observer_node):
        nodes = []
        for constant, value in constants.items():
            model.register_buffer(constant, value)
            nodes.append(graph.get_attr(constant))
        dequantize = graph.call_function(
            DEQUANTIZE_PER_CHANNEL,
            (*nodes, axis, low, high, settings.dtype),
        )
    observer_node.replace_all_uses_with(dequantize)
    graph.erase_node(observer_node)
