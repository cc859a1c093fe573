"""Rewrite the q-dq graph so that XNNPACK reads it correctly, with the same numbers.

XNNPACK computes on int8. It accepts a uint8 pattern too, but reads its integers as int8; and if an operator
reads the integers themselves, XNNPACK drops the dequantize before it also for all other readers. Both
silently give other numbers.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from torchq_compat.lower.executorch.quantized_ops import graphs
from torchq_compat.qspecs.qdq import DEQUANTIZE, QUANTIZE
from torchq_compat.qspecs.qparams import PerTensorQParams

__all__ = ["dequantize_for_each_reader", "shift_to_int8"]

OFFSET = 128


def shift_to_int8(program: ExportedProgram) -> None:
    """Shift, in place, all uint8 qparams whose integers only a dequantize reads: subtract 128 from the zero
    point and the integers."""
    for graph_module in graphs(program.graph_module):
        for quantize in graph_module.graph.find_nodes(op="call_function", target=QUANTIZE):
            if _only_dequantized(quantize):
                _shift(quantize)
        graph_module.recompile()


def dequantize_for_each_reader(program: ExportedProgram) -> None:
    """Give every reader of a dequantize its own copy, in place."""
    graph = program.graph
    for dequantize in graph.find_nodes(op="call_function", target=DEQUANTIZE):
        for reader in list(dequantize.users)[1:]:
            with graph.inserting_before(reader):
                own = graph.node_copy(dequantize)
            reader.replace_input_with(dequantize, own)
    program.graph_module.recompile()


def _only_dequantized(quantize: Node) -> bool:
    qparams = PerTensorQParams.of_node(quantize)
    return qparams.dtype is torch.uint8 and all(
        user.target is DEQUANTIZE and PerTensorQParams.of_node(user) == qparams for user in quantize.users
    )


def _shift(quantize: Node) -> None:
    qparams = PerTensorQParams.of_node(quantize)
    shifted = replace(
        qparams,
        zero_point=qparams.zero_point - OFFSET,
        quant_min=qparams.quant_min - OFFSET,
        quant_max=qparams.quant_max - OFFSET,
        dtype=torch.int8,
    )
    for node in (quantize, *quantize.users):
        node.args = (node.args[0], *shifted.arguments())
    quantize.meta["val"] = quantize.meta["val"].to(torch.int8)
