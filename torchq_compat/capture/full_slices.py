"""Slices of a whole dimension, which torch.export leaves where that dimension is free.

``x[:, 1:3]`` becomes ``slice(slice(x, 0, 0, maximum), 1, 1, 3)``, and with fixed sizes the inner slice is not
there: a Quantizer would write one more spec than on the graph it was written for.
"""

from __future__ import annotations

import sys

import torch
from torch.fx import GraphModule, Node

__all__ = ["drop_full_slices"]

SLICE = torch.ops.aten.slice.Tensor


def drop_full_slices(graph_module: GraphModule) -> None:
    """Let readers of a slice of everything read what was sliced: both are views of the same values."""
    for node in graph_module.graph.find_nodes(op="call_function", target=SLICE):
        source = node.args[0]
        assert isinstance(source, Node)
        if _is_full(*node.args[1:], **node.kwargs):
            node.replace_all_uses_with(source)
            graph_module.graph.erase_node(node)


def _is_full(dim: int = 0, start: object = None, end: object = None, step: object = 1) -> bool:
    return start in (None, 0) and end in (None, sys.maxsize) and step == 1
