"""The names of the parameters of each batch norm in a graph, and the op it was fused with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from torchq_compat.batch_norm.fuse import OUTPUT_DIMENSIONS
from torchq_compat.batch_norm.nodes import BETA, EPS, GAMMA, RUNNING_MEAN, RUNNING_VAR, batch_norm_nodes

__all__ = ["BatchNormParts", "describe_batch_norms"]

ATEN = torch.ops.aten
ROLES = {"weight": GAMMA, "bias": BETA, "running_mean": RUNNING_MEAN, "running_var": RUNNING_VAR}


@dataclass(frozen=True)
class BatchNormParts:
    """One batch norm.

    Attributes:
        names: the attribute of nn.BatchNorm -> the name of the parameter or buffer in the graph.
        eps: the number that is added to the variance.
        op: the convolution or linear that QAT fused with it; None if it is not fused.
        bias: the name of the bias of ``op``; None if there is none.
    """

    names: dict[str, str]
    eps: float
    op: Node | None
    bias: str | None


def describe_batch_norms(graph_module: GraphModule) -> Iterator[BatchNormParts]:
    """Yield the parts of each batch norm of ``graph_module`` with running statistics."""
    for _, node in batch_norm_nodes(graph_module):
        arguments = {role: node.args[position] for role, position in ROLES.items()}
        eps = node.args[EPS]
        assert isinstance(eps, float)
        op, bias = _fused(node)
        names = {role: str(each.target) for role, each in arguments.items() if isinstance(each, Node)}
        yield BatchNormParts(names, eps, op, bias)


def _fused(batch_norm: Node) -> tuple[Node | None, str | None]:
    """Return the op and the name of its bias in ``bn(op(x, w * s) / s + b)``; None for what is not there."""
    source, bias = batch_norm.args[0], None
    if isinstance(source, Node) and source.target is ATEN.add.Tensor:
        reshaped = source.args[1]
        if isinstance(reshaped, Node) and isinstance(reshaped.args[0], Node):
            bias = str(reshaped.args[0].target)
        source = source.args[0]
    if not isinstance(source, Node) or source.target is not ATEN.div.Tensor:
        return None, None
    op = source.args[0]
    return (op, bias) if isinstance(op, Node) and op.target in OUTPUT_DIMENSIONS else (None, None)
