"""Ops on one quantized tensor, value by value or channel by channel."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from torchq_compat.lower.integers import lowered_graph, qdq_graph
from torchq_compat.lower.integers.operators import AFFINE, LOOKUP
from torchq_compat.ops import draws, those
from torchq_compat.read.qdq import QUANTIZE
from torchq_compat.read.qparams import PerTensorQParams
from torchq_compat.support.dtypes import KERNEL_DTYPES
from torchq_compat.support.upstream import OpOverload

# Ops on one quantized tensor, value by value: a table of 256, which the reference's own ops compute.
#
# Legacy: ``nnq.Hardswish``, ``nnq.LeakyReLU``, ``nnq.ELU``, ``nnq.Sigmoid``, ... . Here any such op, any
# chain of them, and a number or a constant for each channel that is added or multiplied.


ATEN = torch.ops.aten
BATCH_NORM = ATEN.batch_norm.default
#: Integers as bytes: the entry of a table for the integer ``i`` is at ``i % 256``.
BYTES = {
    torch.uint8: torch.arange(256).to(torch.uint8),
    torch.int8: torch.arange(256).to(torch.uint8).view(torch.int8),
}


@dataclass(frozen=True)
class _Chain:
    """Ops that compute a value from one integer each.

    Attributes:
        source: the integers.
        value: the dequantized value that the first op reads.
        ops: the ops; each is the only reader of the one before.
        axis: the dimension along which constants differ; None: they do not.
    """

    source: qdq_graph.Integers
    value: Node
    ops: tuple[Node, ...]
    axis: int | None


def is_by_value(op: Node) -> bool:
    """Return whether each number of the result of ``op`` is computed from one number of each input."""
    if not isinstance(op.target, OpOverload) or op.target._schema.is_mutable:
        return False
    if op.target is BATCH_NORM:
        return not qdq_graph.arguments_of(op)["training"]
    return op.target in those("pointwise") or (torch.Tag.pointwise in op.target.tags and not draws(op))


def table_of_chain(site: qdq_graph.OpSite) -> lowered_graph.Kernel | lowered_graph.Refusal | None:
    """Return the table of the longest chain that begins at the op of ``site`` and ends in a quantize."""
    op = site.op
    inputs = [producer for producer in op.all_input_nodes if producer.op != "get_attr"]
    source = qdq_graph.integers_at(inputs[0]) if len(inputs) == 1 and is_by_value(op) else None
    if source is None:
        return None
    ops, end = _ops_from(op)
    if end is None:
        return lowered_graph.Refusal("its result is not quantized to 8 bits")
    shapes = [getattr(qdq_graph.example_value(node), "shape", None) for node in (inputs[0], ops[-1])]
    if None not in shapes and shapes[0] != shapes[1]:
        return lowered_graph.Refusal("its result has another shape than its quantized input")
    axes = {axis for item in ops for axis in _axes(site, item)}
    if None in axes or len(axes) > 1 or (axes and (qdq_graph.rank_of(ops[-1]) or 0) < 2):
        return lowered_graph.Refusal("a constant that it reads differs from place to place")
    chain = _Chain(source, inputs[0], ops, next(iter(axes), None))
    table = _table(site, chain, PerTensorQParams.of_node(end))

    def write(lowered: lowered_graph.LoweredGraph) -> Node:
        return lowered.call(LOOKUP, source.node, lowered.constant(table), chain.axis or 0)

    return lowered_graph.Kernel(str(LOOKUP), write, note="a table of its 256 results", value=end)


def _ops_from(op: Node) -> tuple[tuple[Node, ...], Node | None]:
    """Return ``op`` and what alone reads it value by value, and the quantize at the end, if there is one."""
    ops: list[Node] = [op]
    while True:
        reader = qdq_graph.only_reader(ops[-1])
        if reader is None or reader.op != "call_function":
            return tuple(ops), None
        if reader.target is QUANTIZE:
            is_known = PerTensorQParams.of_node(reader).dtype in KERNEL_DTYPES
            return tuple(ops), reader if is_known else None
        others = [
            producer
            for producer in reader.all_input_nodes
            if producer is not ops[-1] and producer.op != "get_attr"
        ]
        if not is_by_value(reader) or others:
            return tuple(ops), None
        ops.append(reader)


def _axes(site: qdq_graph.OpSite, op: Node) -> Iterator[int | None]:
    """Yield the dimension along which each constant of ``op`` differs; None if it is not one dimension."""
    if op.target is BATCH_NORM:
        yield 1
        return
    rank = qdq_graph.rank_of(op)
    for producer in op.all_input_nodes:
        if producer.op != "get_attr":
            continue
        constant = qdq_graph.constant_of(site.graph_module, producer)
        if constant is None or rank is None:
            yield None
            continue
        if long := [index - constant.dim() for index, size in enumerate(constant.shape) if size != 1]:
            yield rank + long[0] if len(long) == 1 else None


def _table(site: qdq_graph.OpSite, chain: _Chain, qparams: PerTensorQParams) -> Tensor:
    """Return the table: (256,), or a row for each index along the axis of the chain."""
    shape = [1] * max(1, qdq_graph.rank_of(chain.ops[-1]) or 1)
    # The 256 integers lie along another dimension than the channels.
    along = 0 if chain.axis != 0 else 1
    shape[along] = 256
    channels = 1
    if chain.axis is not None:
        shape[chain.axis] = channels = int(qdq_graph.example_value(chain.ops[-1]).shape[chain.axis])
    integers = BYTES[chain.source.qparams.dtype].reshape(
        [256 if d == along else 1 for d in range(len(shape))]
    )
    floats = _run(site, chain, chain.source.qparams.dequantize(integers.expand(shape)))
    rows = qparams.quantize(floats).movedim(along, -1).reshape(channels, 256)
    return rows[0].clone() if chain.axis is None else rows.contiguous()


def _run(site: qdq_graph.OpSite, chain: _Chain, x: Tensor) -> Tensor:
    values: dict[Node, Any] = {chain.value: x}

    def read(node: Node) -> Any:
        if node not in values:
            values[node] = qdq_graph.constant_of(site.graph_module, node)
        return values[node]

    for op in chain.ops:
        assert callable(op.target)
        values[op] = op.target(*map_arg(op.args, read), **map_arg(op.kwargs, read))
    result: Tensor = values[chain.ops[-1]]
    return result


def requantize(
    lowered: lowered_graph.LoweredGraph, source: qdq_graph.Integers, qparams: PerTensorQParams
) -> Node:
    """Write the integers of ``source`` on other ``qparams``; nothing if they are the same."""
    if source.qparams == qparams:
        return source.node
    table = qparams.quantize(source.qparams.dequantize(BYTES[source.qparams.dtype]))
    return lowered.call(LOOKUP, source.node, lowered.constant(table), 0)


# Batch norms of a quantized tensor. Legacy: ``nnq.BatchNorm2d``, ``nniq.BNReLU2d`` and the 3d ones.


def _batch_norm(site: qdq_graph.OpSite) -> lowered_graph.Kernel | lowered_graph.Refusal | None:
    source, qparams = qdq_graph.integers_at(site.arguments["input"]), site.result.qparams
    if site.arguments["training"]:
        return lowered_graph.Refusal("it normalizes by the statistics of its input")
    if source is None or qparams is None:
        return lowered_graph.Refusal("its input and its result are not both quantized per tensor to 8 bits")
    weight, bias, mean, variance = map(site.constant, ("weight", "bias", "running_mean", "running_var"))
    if mean is None or variance is None:
        return lowered_graph.Refusal("its statistics are no constants")
    # Formula: torch.nn.BatchNorm2d, as one factor and one offset for each channel.
    factor = torch.rsqrt(variance.double() + site.arguments["eps"])
    factor = factor if weight is None else factor * weight
    offset = -mean * factor if bias is None else bias - mean * factor

    def write(lowered: lowered_graph.LoweredGraph) -> Node:
        numbers = (lowered.constant(item.to(torch.float32)) for item in (factor, offset))
        return lowered.call(AFFINE, *source.arguments, *numbers, 1, *lowered_graph.of_result(qparams))

    return lowered_graph.Kernel(str(AFFINE), write)


BATCH_NORMS = lowered_graph.Family({torch.ops.aten.batch_norm.default: _batch_norm})
