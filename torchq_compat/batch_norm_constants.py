"""eps and momentum of batch norms, across torchao's conv-bn fusion for QAT.

The fusion replaces conv + batch norm by a pattern with the default eps 1e-5 and momentum 0.1, whatever the
model had (torchao qat_utils.py matches with literals ignored); with eps 1e-3 another model would be trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch.fx import GraphModule, Node

__all__ = [
    "EPS",
    "GAMMA",
    "RUNNING_VAR",
    "batch_norm_constants",
    "batch_norm_nodes",
    "restore_batch_norm_constants",
]

ATEN = torch.ops.aten
#: Positions of aten.batch_norm's arguments.
GAMMA, RUNNING_MEAN, RUNNING_VAR, MOMENTUM, EPS = 1, 3, 4, 6, 7
PATTERN_EPS = 1e-5
#: Running mean's path -> (momentum, eps).
Constants = Mapping[str, tuple[float, float]]


def batch_norm_constants(graph_module: GraphModule) -> Constants:
    """The constants of every batch norm, by the path of its running mean."""
    return {
        path: (float(node.args[MOMENTUM]), float(node.args[EPS]))  # type: ignore[arg-type]
        for path, node in batch_norm_nodes(graph_module)
    }


def restore_batch_norm_constants(graph_module: GraphModule, constants: Constants) -> None:
    """Write ``constants`` back, into batch norms and into the weight scale ``gamma / sqrt(var + eps)``."""
    for path, node in batch_norm_nodes(graph_module):
        momentum, eps = constants[path]
        node.update_arg(MOMENTUM, momentum)
        node.update_arg(EPS, eps)
        variance = node.args[RUNNING_VAR]
        assert isinstance(variance, Node)
        for sum_with_eps in _sums_with_eps(graph_module, str(variance.target)):
            sum_with_eps.update_arg(1, eps)
    graph_module.recompile()


def batch_norm_nodes(graph_module: GraphModule) -> Iterator[tuple[str, Node]]:
    """(path of the running mean, node) of every batch norm."""
    for node in graph_module.graph.nodes:
        if node.target is ATEN.batch_norm.default and isinstance(node.args[RUNNING_MEAN], Node):
            yield str(node.args[RUNNING_MEAN].target), node


def _sums_with_eps(graph_module: GraphModule, variance: str) -> Iterator[Node]:
    for node in graph_module.graph.nodes:
        if node.op == "get_attr" and node.target == variance:
            for user in list(node.users):
                if user.target is ATEN.add.Tensor and user.args[1] == PATTERN_EPS:
                    yield user
