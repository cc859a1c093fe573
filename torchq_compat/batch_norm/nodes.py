"""The batch norm nodes of a captured graph, and the positions of their arguments."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

from torchq_compat.support.graph_nodes import module_path_of

__all__ = [
    "BETA",
    "EPS",
    "GAMMA",
    "MOMENTUM",
    "RUNNING_MEAN",
    "RUNNING_VAR",
    "TRAINING",
    "batch_norm_nodes",
    "batch_norms_by_path",
]

#: Positions of aten.batch_norm's arguments.
GAMMA, BETA, RUNNING_MEAN, RUNNING_VAR, TRAINING, MOMENTUM, EPS = range(1, 8)


def batch_norm_nodes(graph_module: GraphModule) -> Iterator[tuple[str, Node]]:
    """Yield (path of the running mean, node) for every batch norm with a running mean."""
    for node in graph_module.graph.nodes:
        if node.target is torch.ops.aten.batch_norm.default and isinstance(node.args[RUNNING_MEAN], Node):
            yield str(node.args[RUNNING_MEAN].target), node


def batch_norms_by_path(graph_module: GraphModule) -> dict[str, str]:
    """Return the path of every batch norm -> the path of the op before it, empty if that is no module."""
    found = {}
    for _, node in batch_norm_nodes(graph_module):
        source = node.args[0]
        assert isinstance(source, Node)
        found[module_path_of(node)] = module_path_of(source)
    return found
