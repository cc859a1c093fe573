"""uint8 grids as int8 grids: integers and zero points less 128, the same numbers.

XNNPACK computes on int8. It takes a uint8 pattern as well, and reads its integers as int8: other numbers,
without a word.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from torchq_compat.lower.executorch.quantized_ops import graphs
from torchq_compat.specs.grids import PerTensorGrid

__all__ = ["shift_to_int8"]

OPS = torch.ops.quantized_decomposed
QUANTIZE, DEQUANTIZE = OPS.quantize_per_tensor.default, OPS.dequantize_per_tensor.default
OFFSET = 128


def shift_to_int8(program: ExportedProgram) -> None:
    """Shift, in place, every uint8 grid whose integers only a dequantize reads."""
    for graph_module in graphs(program.graph_module):
        for quantize in graph_module.graph.find_nodes(op="call_function", target=QUANTIZE):
            if _only_dequantized(quantize):
                _shift(quantize)
        graph_module.recompile()


def _only_dequantized(quantize: Node) -> bool:
    grid = PerTensorGrid.of_node(quantize)
    return grid.dtype is torch.uint8 and all(
        user.target is DEQUANTIZE and PerTensorGrid.of_node(user) == grid for user in quantize.users
    )


def _shift(quantize: Node) -> None:
    grid = PerTensorGrid.of_node(quantize)
    shifted = replace(
        grid,
        zero_point=grid.zero_point - OFFSET,
        quant_min=grid.quant_min - OFFSET,
        quant_max=grid.quant_max - OFFSET,
        dtype=torch.int8,
    )
    qparams = (shifted.scale, shifted.zero_point, shifted.quant_min, shifted.quant_max, shifted.dtype)
    for node in (quantize, *quantize.users):
        node.args = (node.args[0], *qparams)
    quantize.meta["val"] = quantize.meta["val"].to(torch.int8)
