"""Weights of embeddings: their zero points are floats, and so cannot be added after rounding.

quantized_decomposed.quantize_per_channel computes ``round(x / scale) + zero_point`` and truncates the sum to
an integer, up to one step below FX's ``round(x / scale + zero_point)``, which is what a fake-quantize trains.
So the integers are made here, at convert, and only the dequantize goes into the graph.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

__all__ = ["fold_float_qparams_weights"]


def fold_float_qparams_weights(prepared: GraphModule, observers: Iterable[tuple[Node, nn.Module]]) -> None:
    """Replace each of ``observers`` that has float qparams by the dequantize of a folded integer weight."""
    for node, observer in list(observers):
        if getattr(observer, "qscheme", None) is torch.per_channel_affine_float_qparams:
            _fold(prepared, node, observer)
    prepared.recompile()


def _fold(prepared: GraphModule, observer_node: Node, observer: nn.Module) -> None:
    source, graph = observer_node.args[0], prepared.graph
    assert isinstance(source, Node)
    name = str(source.target).replace(".", "_")
    with graph.inserting_before(observer_node):
        nodes = []
        for kind, value in _constants(observer, _attribute(prepared, str(source.target))).items():
            prepared.register_buffer(f"{name}_{kind}", value)
            nodes.append(graph.get_attr(f"{name}_{kind}"))
        dequantize = graph.call_function(
            torch.ops.quantized_decomposed.dequantize_per_channel.default,
            (*nodes, observer.ch_axis, observer.quant_min, observer.quant_max, observer.dtype),  # type: ignore[arg-type]
        )
    observer_node.replace_all_uses_with(dequantize)
    graph.erase_node(observer_node)


def _constants(observer: nn.Module, weight: Tensor) -> dict[str, Tensor]:
    """Integers of the shape of ``weight``; ``scales`` and ``zero_points`` of shape (channels,), float32."""
    scales, zero_points = observer.calculate_qparams()  # type: ignore[operator]
    shape = [-1 if axis == observer.ch_axis else 1 for axis in range(weight.dim())]
    integers = torch.round(weight.detach() / scales.view(shape) + zero_points.view(shape))
    clamped = integers.clamp(observer.quant_min, observer.quant_max)  # type: ignore[arg-type]
    quantized = clamped.to(observer.dtype)  # type: ignore[arg-type]
    return {"quantized": quantized, "scales": scales, "zero_points": zero_points}


def _attribute(root: nn.Module, path: str) -> Tensor:
    parent, _, name = path.rpartition(".")
    value = getattr(root.get_submodule(parent), name)
    assert isinstance(value, Tensor)
    return value
