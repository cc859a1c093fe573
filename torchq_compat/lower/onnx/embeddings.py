"""Embeddings with integer tables: the rows that are looked up are dequantized, not the table.

The optimizer of torch.onnx would else fold the table into one of floats.
"""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Argument

from torchq_compat.qspecs.qdq import DEQUANTIZE_PER_CHANNEL

__all__ = ["look_up_integers"]

ATEN = torch.ops.aten


def look_up_integers(program: ExportedProgram) -> None:
    """Rewrite ``dequantize_per_channel(table)[indices]`` in place, as operators on the rows."""
    for module in program.graph_module.modules():
        if isinstance(module, GraphModule):
            for embedding in module.graph.find_nodes(op="call_function", target=ATEN.embedding.default):
                _look_up(module.graph, embedding)
            module.graph.eliminate_dead_code()
            module.recompile()


def _look_up(graph: Graph, embedding: Node) -> None:
    table, indices = embedding.args[:2]
    assert isinstance(table, Node)
    if table.target is not DEQUANTIZE_PER_CHANNEL or table.kwargs or table.args[3] != 0:
        return
    integers, scales, zero_points = table.args[:3]
    with graph.inserting_before(embedding):

        def rows_of(tensor: Argument) -> Node:
            rows = graph.call_function(ATEN.index.Tensor, (tensor, [indices]))
            return graph.call_function(ATEN.to.dtype, (rows, torch.float32))

        def column_of(tensor: Argument) -> Node:
            return graph.call_function(ATEN.unsqueeze.default, (rows_of(tensor), -1))

        shifted = graph.call_function(ATEN.sub.Tensor, (rows_of(integers), column_of(zero_points)))
        result = graph.call_function(ATEN.mul.Tensor, (shifted, column_of(scales)))
    result.meta = dict(embedding.meta)
    embedding.replace_all_uses_with(result)
    graph.erase_node(embedding)
