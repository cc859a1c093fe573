"""Embeddings with integer tables: the rows that are looked up are dequantized, not the table.

The optimizer of torch.onnx would else fold the table into one of floats.
"""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from torchq_compat.graph.plain_tables import look_up_rows

__all__ = ["look_up_integers"]

ATEN = torch.ops.aten


def look_up_integers(program: ExportedProgram) -> None:
    """Rewrite ``dequantize_per_channel(table)[indices]`` in place, as operators on the rows."""
    for module in program.graph_module.modules():
        if isinstance(module, GraphModule):
            for embedding in module.graph.find_nodes(op="call_function", target=ATEN.embedding.default):
                look_up_rows(module.graph, embedding)
            module.graph.eliminate_dead_code()
            module.recompile()
