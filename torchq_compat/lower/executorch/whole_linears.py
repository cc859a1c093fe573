"""``addmm`` and ``mm`` by a transposed weight as ``linear`` again, as it was before ExecuTorch's decompositions.

Its kernel for ``linear`` is a matrix product of a BLAS; the one for ``addmm`` is three loops, thirty times slower
at 512 hidden units, behind a copy of the weight.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassResult

from torchq_compat.lower.executorch.quantized_ops import graphs
from torchq_compat.lower.executorch.runtime import executorch_module

__all__ = ["restore_linears"]


def restore_linears(graph_module: GraphModule) -> PassResult:
    """Rewrite an edge graph and the bodies of its loops, in place."""
    edge = executorch_module("exir.dialects._ops").ops.edge.aten
    changed = False
    for each in graphs(graph_module):
        for node in each.graph.nodes:
            operands = _operands(node)
            if operands is not None:
                node.target, node.args = edge.linear.default, operands
                changed = True
        each.graph.eliminate_dead_code()
        each.recompile()
    return PassResult(graph_module, changed)


def _operands(node: Node) -> tuple[Node | None, ...] | None:
    """(x, weight, bias) if ``node`` is a linear in other words."""
    aten = torch.ops.aten
    if _is(node, aten.addmm) and not node.kwargs:
        bias, x, transposed = node.args
    elif _is(node, aten.mm):
        bias, (x, transposed) = None, node.args
    else:
        return None
    if not isinstance(transposed, Node) or not _is(transposed, aten.permute_copy):
        return None
    weight, order = transposed.args
    if list(order) != [1, 0] or (bias is not None and bias.meta["val"].dim() != 1):
        return None
    return x, weight, bias


def _is(node: Node, packet: torch._ops.OpOverloadPacket) -> bool:
    return getattr(node.target, "_op", None) is packet.default
