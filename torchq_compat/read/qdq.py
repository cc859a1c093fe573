"""q-dq nodes: the only module that names, recognizes and inserts the ``quantized_decomposed`` operators.

A *static* node has its qparams in the graph, as literals per tensor and as constants per channel; a *dynamic*
node reads the qparams that ``CHOOSE_QPARAMS`` computes from the tensor in each run. ``QParams``
(``qparams.py``) are the values: ``PerTensorQParams.of_node`` reads them from a node; they quantize tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

import torchq_compat.support.upstream  # noqa: F401 - registers quantized_decomposed
from torchq_compat.support.graph_nodes import free_name

NAMESPACE = "quantized_decomposed"
_OPS = torch.ops.quantized_decomposed
#: Static, per tensor.
QUANTIZE = _OPS.quantize_per_tensor.default
DEQUANTIZE = _OPS.dequantize_per_tensor.default
#: Static, per channel.
QUANTIZE_PER_CHANNEL = _OPS.quantize_per_channel.default
DEQUANTIZE_PER_CHANNEL = _OPS.dequantize_per_channel.default
#: Dynamic, per tensor.
CHOOSE_QPARAMS = _OPS.choose_qparams.tensor
QUANTIZE_DYNAMIC = _OPS.quantize_per_tensor.tensor
DEQUANTIZE_DYNAMIC = _OPS.dequantize_per_tensor.tensor
#: A cast that no compiler may fuse away: to float16 and back.
CONVERT_DTYPE = _OPS.convert_element_type.no_fuse

#: The operators that convert static integers to floats.
DEQUANTIZES = (DEQUANTIZE, DEQUANTIZE_PER_CHANNEL)
#: The operators that convert inserts around the ops of the model.
ALL_OPS = (
    QUANTIZE,
    *DEQUANTIZES,
    QUANTIZE_PER_CHANNEL,
    CHOOSE_QPARAMS,
    QUANTIZE_DYNAMIC,
    DEQUANTIZE_DYNAMIC,
    CONVERT_DTYPE,
)

#: Makes a node that reads a tensor, given a name for it.
MakeConstant = Callable[[str, Tensor], Node]


def embedding_byte() -> Any:
    """Return the operator that looks up rows of an integer table and dequantizes them; it exists once
    ExecuTorch is imported."""
    return _OPS.embedding_byte.default


def is_dequantize(node: Any) -> bool:
    """Return whether ``node`` is a static dequantize."""
    return isinstance(node, Node) and node.target in DEQUANTIZES


def integers_behind(dequantize: Node) -> Node:
    """Return the node whose integers ``dequantize`` reads."""
    source = dequantize.args[0]
    assert isinstance(source, Node)
    return source


def insert_quantize(graph: Graph, source: Node, qparams: Any, constant: MakeConstant) -> Node:
    """Insert the quantize of ``source`` at the graph's insertion point, without ``meta``."""
    return graph.call_function(qparams.quantize_op, (source, *_arguments(source, qparams, constant)))


def insert_dequantize(
    graph: Graph,
    integers: Node,
    qparams: Any,
    constant: MakeConstant,
    out_dtype: torch.dtype = torch.float32,
) -> Node:
    """Insert the dequantize of ``integers`` at the graph's insertion point, without ``meta``.

    Args:
        graph: the graph of ``integers``.
        integers: a node whose value is integers of ``qparams.dtype``.
        qparams: per tensor or per channel.
        constant: makes the nodes of per-channel scales and zero points.
        out_dtype: the float dtype of the result.
    """
    kwargs: dict[str, Any] = {} if out_dtype is torch.float32 else {"out_dtype": out_dtype}
    args = (integers, *_arguments(integers, qparams, constant))
    return graph.call_function(qparams.dequantize_op, args, kwargs)


def insert_q_dq(graph: Graph, source: Node, qparams: Any, constant: MakeConstant) -> Node:
    """Insert the quantize and dequantize of ``source``, with the same constants; return the dequantize, which
    has the ``meta`` of ``source``."""
    arguments = _arguments(source, qparams, constant)
    quantize = graph.call_function(qparams.quantize_op, (source, *arguments))
    dequantize = graph.call_function(qparams.dequantize_op, (quantize, *arguments))
    dequantize.meta = dict(source.meta)
    return dequantize


def insert_dynamic_q_dq(
    graph: Graph,
    source: Node,
    chosen_range: tuple[int, int],
    limits: tuple[int, int],
    *,
    eps: float,
    dtype: torch.dtype,
) -> Node:
    """Insert nodes that choose qparams for ``source``, quantize and dequantize it.

    Args:
        graph: the graph of ``source``.
        source: a node whose value is floats.
        chosen_range: the integers over which the range of the tensor is spread.
        limits: the integers to which the quantize clamps.
        eps: the smallest scale.
        dtype: the dtype of the integers.

    Returns:
        The dequantize.
    """
    chosen = graph.call_function(CHOOSE_QPARAMS, (source, *chosen_range, eps, dtype))
    scale, zero_point = (graph.call_function(operator.getitem, (chosen, index)) for index in range(2))
    arguments = (scale, zero_point, *limits, dtype)
    integers = graph.call_function(QUANTIZE_DYNAMIC, (source, *arguments))
    return graph.call_function(DEQUANTIZE_DYNAMIC, (integers, *arguments))


def _arguments(source: Node, qparams: Any, constant: MakeConstant) -> tuple[Any, ...]:
    value = source.meta.get("val")
    device = value.device if isinstance(value, Tensor) else torch.device("cpu")
    arguments: tuple[Any, ...] = qparams.arguments(source.name, constant, device)
    return arguments


def constants_in(graph_module: GraphModule) -> MakeConstant:
    """Return a function that keeps tensors as buffers of ``graph_module`` and makes nodes that read them."""

    def constant(name: str, value: Tensor) -> Node:
        name = free_name(graph_module, name)
        # Not graph_module.register_buffer: the class of a standalone module may override it.
        nn.Module.register_buffer(graph_module, name, value)
        return graph_module.graph.get_attr(name)

    return constant
