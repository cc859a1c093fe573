"""Decide the memory format of what regions return.

Convolution kernels return channels-last tensors; the compiler has to know it, and would convert them twice
otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from functools import partial

import torch
from torch import Tensor
from torch.fx import Graph, Node

from torchq_compat.lower.x86.qdq_operands import rank_of

__all__ = ["Layout", "images", "layout_of"]

ATEN = torch.ops.aten
#: Ops whose results have other dimensions than what they read.
OTHER_DIMENSIONS = frozenset(
    {
        ATEN.view.default,
        ATEN.reshape.default,
        ATEN.permute.default,
        ATEN.transpose.int,
        ATEN.matmul.default,
        ATEN.bmm.default,
    }
)
#: Gives a tensor its layout.
Layout = Callable[[Tensor], Tensor]
#: Rank of an image or a video -> the layout that kernels give it.
LAYOUTS: dict[int, Layout] = {
    4: partial(Tensor.contiguous, memory_format=torch.channels_last),
    5: partial(Tensor.contiguous, memory_format=torch.channels_last_3d),
}


def images(graph: Graph) -> frozenset[Node]:
    """Return the nodes whose dimensions are those of a convolution's result."""
    found: set[Node] = set()
    for node in graph.nodes:
        if _convolves(node) or (node.target not in OTHER_DIMENSIONS and _continues(node, found)):
            found.add(node)
    return frozenset(found)


def layout_of(node: Node, images: Container[Node]) -> Layout:
    """Return the layout of the value at ``node``."""
    rank = rank_of(node) if node in images else None
    return LAYOUTS.get(rank or 0, Tensor.contiguous)


def _continues(node: Node, found: Container[Node]) -> bool:
    return any(source in found and rank_of(source) == rank_of(node) for source in node.all_input_nodes)


def _convolves(node: Node) -> bool:
    return node.op == "call_function" and str(node.target).startswith("aten.conv")
