"""Rewrite quantized operators to the form that ExecuTorch's kernels accept, with the same numbers.

A kernel that is given another form stops the process, not the call, so every form has to be right before the
program is written.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

from torchq_compat.qspecs.qdq import (
    CONVERT_DTYPE,
    DEQUANTIZE_PER_CHANNEL,
    QUANTIZE_PER_CHANNEL,
    embedding_byte,
)

__all__ = ["fit_quantized_ops", "graphs"]

ATEN = torch.ops.aten


def fit_quantized_ops(program: ExportedProgram) -> None:
    """Rewrite in place: a per-channel quantize reads its scales as float64; a cast to float16 becomes a plain
    cast; a quantized embedding dequantizes the rows that are looked up, not the table."""
    for graph_module in graphs(program.graph_module):
        graph = graph_module.graph
        for quantize in graph.find_nodes(op="call_function", target=QUANTIZE_PER_CHANNEL):
            _take_scales_as_double(graph, quantize)
        for cast in graph.find_nodes(op="call_function", target=CONVERT_DTYPE):
            cast.args, cast.kwargs, cast.target = (
                cast.args[:1],
                {"dtype": cast.args[1]},
                ATEN._to_copy.default,
            )
        for embedding in graph.find_nodes(op="call_function", target=ATEN.embedding.default):
            _look_up_integers(graph, embedding)
        graph.eliminate_dead_code()
        graph_module.recompile()


def graphs(graph_module: GraphModule) -> Iterator[GraphModule]:
    """Return ``graph_module`` and the bodies of its loops."""
    return (module for module in graph_module.modules() if isinstance(module, GraphModule))


def _take_scales_as_double(graph: Graph, quantize: Node) -> None:
    scales = quantize.args[1]
    assert isinstance(scales, Node)
    with graph.inserting_before(quantize):
        quantize.update_arg(1, _cast(graph, scales, torch.float64))


def _look_up_integers(graph: Graph, embedding: Node) -> None:
    """Rewrite ``dequantize_per_channel(table)[indices]`` as ``embedding_byte``: the dequantize kernel
    supports no float zero points, which embeddings have."""
    table = embedding.args[0]
    assert isinstance(table, Node)
    if table.target is not DEQUANTIZE_PER_CHANNEL or table.kwargs or table.args[3] != 0:
        return
    integers, scales, zero_points, _, low, high, _ = table.args
    assert isinstance(scales, Node)
    assert isinstance(zero_points, Node)
    with graph.inserting_before(embedding):
        if zero_points.meta["val"].dtype != scales.meta["val"].dtype:
            zero_points = _cast(graph, zero_points, scales.meta["val"].dtype)
        lookup = graph.call_function(
            embedding_byte(), (integers, scales, zero_points, low, high, embedding.args[1])
        )
    lookup.meta = dict(embedding.meta)
    embedding.replace_all_uses_with(lookup)
    graph.erase_node(embedding)


def _cast(graph: Graph, node: Node, dtype: torch.dtype) -> Node:
    cast = graph.call_function(ATEN._to_copy.default, (node,), {"dtype": dtype})
    cast.meta = {**node.meta, "val": node.meta["val"].to(dtype)}
    return cast
