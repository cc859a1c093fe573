"""Where the batch norms of a captured graph are, and what their arguments mean."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

__all__ = [
    "BETA",
    "EPS",
    "GAMMA",
    "MOMENTUM",
    "RUNNING_MEAN",
    "RUNNING_VAR",
    "TRAINING",
    "batch_norm_nodes",
]

#: Positions of aten.batch_norm's arguments.
GAMMA, BETA, RUNNING_MEAN, RUNNING_VAR, TRAINING, MOMENTUM, EPS = range(1, 8)


def batch_norm_nodes(graph_module: GraphModule) -> Iterator[tuple[str, Node]]:
    """Yield (path of the running mean, node) of every batch norm that has one."""
    for node in graph_module.graph.nodes:
        if node.target is torch.ops.aten.batch_norm.default and isinstance(node.args[RUNNING_MEAN], Node):
            yield str(node.args[RUNNING_MEAN].target), node
