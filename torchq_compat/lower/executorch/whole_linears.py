"""Restore ``linear`` from ``addmm`` and ``mm`` by a transposed weight, to which ExecuTorch decomposes it.

The kernel for ``linear`` is a matrix product of a BLAS; the kernel for ``addmm`` is three loops after a copy
of the weight, thirty times slower in an LSTM of 512 hidden units.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassResult

from torchq_compat.lower.executorch.quantized_ops import graphs
from torchq_compat.lower.executorch.runtime import executorch_module
from torchq_compat.support.upstream import OpOverloadPacket

__all__ = ["restore_linears"]


def restore_linears(graph_module: GraphModule) -> PassResult:
    """Rewrite an edge graph and the bodies of its loops in place."""
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
    """Return (x, weight, bias) if ``node`` is a decomposed linear; else None."""
    aten = torch.ops.aten
    if node.kwargs or not (_is(node, aten.addmm) or _is(node, aten.mm)):
        return None
    *bias, x, transposed = (arg for arg in node.args if isinstance(arg, Node))
    if not _is(transposed, aten.permute_copy) or transposed.args[1] != [1, 0]:
        return None
    if any(each.meta["val"].dim() != 1 for each in bias):
        return None
    return x, transposed.all_input_nodes[0], bias[0] if bias else None


def _is(node: Node, packet: OpOverloadPacket) -> bool:
    return getattr(node.target, "_op", None) is packet.default
