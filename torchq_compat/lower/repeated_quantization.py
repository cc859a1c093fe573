"""A quantize straight after a dequantize on its own grid: dropped, since it changes no bit."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from torchq_compat.specs.grids import PerTensorGrid

__all__ = ["drop_repeated_quantization"]

OPS = torch.ops.quantized_decomposed
QUANTIZE, DEQUANTIZE = OPS.quantize_per_tensor.default, OPS.dequantize_per_tensor.default


def drop_repeated_quantization(graph: Graph) -> None:
    """Let the readers of such a quantize read the integers that were dequantized."""
    for node in graph.find_nodes(op="call_function", target=QUANTIZE):
        source = node.args[0]
        if _is_repeated(node) and graph.output_node() not in node.users:
            node.replace_all_uses_with(source.args[0])
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _is_repeated(quantize: Node) -> bool:
    source = quantize.args[0]
    if not isinstance(source, Node) or source.target is not DEQUANTIZE or source.kwargs:
        return False
    grid = PerTensorGrid.of_node(quantize)
    return grid.is_kept_by_float32 and grid == PerTensorGrid.of_node(source)
