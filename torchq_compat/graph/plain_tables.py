"""Integer tables with float zero points, FX's scheme for embeddings, rewritten for exported programs.

torch computes ``dequantize_per_channel`` with float zero points, other runtimes do not: ExecuTorch's kernel
stops the process. An exported graph computes the same numbers with plain operators, and for an embedding only
on the rows that are looked up.
"""

from __future__ import annotations

import copy
import warnings

import torch
from torch import nn
from torch.fx import Graph, Node
from torch.fx.node import Argument

from torchq_compat.qspecs.qdq import DEQUANTIZE_PER_CHANNEL
from torchq_compat.support.graph_nodes import attribute_of

__all__ = ["look_up_rows", "with_plain_tables"]

ATEN = torch.ops.aten


def with_plain_tables(model: nn.Module, graph: Graph) -> Graph | None:
    """Return a copy of ``graph`` that dequantizes tables with float zero points by plain operators.

    Args:
        model: the module with the tensors that ``graph`` reads.
        graph: the graph; it is not changed.

    Returns:
        The copy; None if ``graph`` has no such table.
    """
    if not any(_has_float_zero_points(model, node) for node in _dequantizes(graph)):
        return None
    with warnings.catch_warnings():
        # Copying the TreeSpecs of an exported graph triggers a warning about torch's own pytree code.
        warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
        plain = copy.deepcopy(graph)
    for table in _dequantizes(plain):
        if _has_float_zero_points(model, table):
            _write_plain(plain, table)
    return plain


def look_up_rows(graph: Graph, embedding: Node) -> None:
    """Rewrite ``dequantize_per_channel(table)[indices]`` in place, as operators on the rows.

    Args:
        graph: the graph of ``embedding``; the dequantize of the table stays in it.
        embedding: an ``aten.embedding`` node; not changed unless its table is such a dequantize, by rows.
    """
    table, indices = embedding.args[:2]
    assert isinstance(table, Node)
    if table.target is not DEQUANTIZE_PER_CHANNEL or table.args[3] != 0:
        return
    integers, scales, zero_points = table.args[:3]
    with graph.inserting_before(embedding):

        def rows_of(tensor: Argument) -> Node:
            rows = graph.call_function(ATEN.index.Tensor, (tensor, [indices]))
            return graph.call_function(ATEN.to.dtype, (rows, torch.float32))

        def column_of(tensor: Argument) -> Node:
            return graph.call_function(ATEN.unsqueeze.default, (rows_of(tensor), -1))

        shifted = graph.call_function(ATEN.sub.Tensor, (rows_of(integers), column_of(zero_points)))
        result = _in_out_dtype(graph, table, (shifted, column_of(scales)))
    result.meta = dict(embedding.meta)
    embedding.replace_all_uses_with(result)
    graph.erase_node(embedding)


def _dequantizes(graph: Graph) -> list[Node]:
    return list(graph.find_nodes(op="call_function", target=DEQUANTIZE_PER_CHANNEL))


def _has_float_zero_points(model: nn.Module, dequantize: Node) -> bool:
    zero_points = dequantize.args[2]
    if not isinstance(zero_points, Node) or zero_points.op != "get_attr":
        return False
    return bool(attribute_of(model, zero_points).is_floating_point())


def _write_plain(graph: Graph, table: Node) -> None:
    for reader in list(table.users):
        if reader.target is ATEN.embedding.default and reader.args[0] is table:
            look_up_rows(graph, reader)
    if table.users:
        _dequantize_whole(graph, table)
    else:
        graph.erase_node(table)


def _dequantize_whole(graph: Graph, table: Node) -> None:
    integers, scales, zero_points, axis = table.args[:4]
    assert isinstance(integers, Node)
    assert isinstance(axis, int)
    with graph.inserting_before(table):
        # The channel dimension is moved last, where the scales broadcast.
        moved = graph.call_function(ATEN.movedim.int, (integers, axis, -1))
        floats = graph.call_function(ATEN.to.dtype, (moved, torch.float32))
        shifted = graph.call_function(ATEN.sub.Tensor, (floats, zero_points))
        result = _in_out_dtype(graph, table, (shifted, scales))
        result = graph.call_function(ATEN.movedim.int, (result, -1, axis))
    result.meta = dict(table.meta)
    table.replace_all_uses_with(result)
    graph.erase_node(table)


def _in_out_dtype(graph: Graph, table: Node, factors: tuple[Node, Argument]) -> Node:
    """Insert the product of ``factors``, in the dtype that ``table`` dequantizes to."""
    product = graph.call_function(ATEN.mul.Tensor, factors)
    dtype = table.kwargs.get("out_dtype")
    return product if dtype is None else graph.call_function(ATEN.to.dtype, (product, dtype))
