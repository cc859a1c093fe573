"""Sizes for trials: the example's, cut to be cheap, and two other sets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchq_compat.lower.x86.qdq_operands import arguments_of, constant_of, example_value

__all__ = ["Sizes", "trial_sizes"]

ATEN = torch.ops.aten
#: Node that a kernel reads -> its sizes in a trial.
Sizes = dict[Node, tuple[int, ...]]
LINEAR = ATEN.linear.default
CONVOLUTIONS = (
    ATEN.conv1d.default,
    ATEN.conv2d.default,
    ATEN.conv3d.default,
    ATEN.conv1d.padding,
    ATEN.conv2d.padding,
    ATEN.conv3d.padding,
    ATEN.conv_transpose1d.default,
    ATEN.conv_transpose2d.input,
    ATEN.conv_transpose3d.input,
)
#: The most products of a trial, at the example's sizes and at the other sizes; a few always run.
PRODUCTS = (1 << 24, 1 << 22)
#: The most values read in a trial of an op without weights.
VALUES = 1 << 16
#: The value of a size that depends on data, say the number of rows of a PackedSequence.
OF_DATA = 5
#: The divisors of the example's sizes in each trial: (batch or rows, spatial).
SMALLER = ((1, 1), (2, 3), (1, 2))


def trial_sizes(graph_module: GraphModule, op: Node, nodes: Sequence[Node]) -> list[Sizes]:
    """Return the sizes of ``nodes``, which ``op`` reads, in each trial; an empty list if they are unknown."""
    weight = _weight_shape(graph_module, op)
    shapes = [example_shape(node) for node in nodes]
    if op.target is LINEAR and weight is not None:
        found = [(*shape[:-1], weight[1]) if shape else (4, weight[1]) for shape in shapes]
        return _distinct([_linear(nodes, found, weight, index) for index in range(3)])
    known = [shape for shape in shapes if shape is not None]
    if not nodes or len(known) < len(shapes):
        return []
    if op.target in CONVOLUTIONS and weight is not None:
        return _distinct([_convolution(op, nodes, known, weight, index) for index in range(3)])
    return _distinct([_by_batch(nodes, known, index) for index in range(3)])


def example_shape(node: Node) -> tuple[int, ...] | None:
    """Return the sizes of ``node`` with the example inputs."""
    value = example_value(node)
    if not isinstance(value, Tensor):
        return None
    return tuple(map(_hint, value.shape))


def _hint(size: Any) -> int:
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else OF_DATA


def _weight_shape(graph_module: GraphModule, op: Node) -> tuple[int, ...] | None:
    node = arguments_of(op).get("weight")
    while isinstance(node, Node) and node.op == "call_function":
        node = node.args[0]  # Skip the dequantize, or the casts of a weight in float16.
    constant = constant_of(graph_module, node)
    return None if constant is None else tuple(constant.shape)


def _distinct(sizes: list[Sizes]) -> list[Sizes]:
    """Return ``sizes`` without empty tensors; equal sizes are kept, as each trial has values of its own."""
    return [each for each in sizes if all(math.prod(shape) for shape in each.values())]


def _cut(size: int, index: int, divisor: int, least: int) -> int:
    """Return ``size``, divided by ``divisor`` in other trials; the last adds one to make even sizes odd."""

    return max(least, size if index == 0 else -(-size // divisor) + (index == 2))


def _linear(
    nodes: Sequence[Node], shapes: list[tuple[int, ...]], weight: tuple[int, ...], index: int
) -> Sizes:
    most = max(2, PRODUCTS[index > 0] // math.prod(weight))
    return {node: _rows(shape, index, most) for node, shape in zip(nodes, shapes, strict=True)}


def _rows(shape: tuple[int, ...], index: int, most: int) -> tuple[int, ...]:
    rows = [_cut(size, index, SMALLER[index][0], 1) for size in shape[:-1]]
    for position in range(len(rows)):
        others = math.prod(rows) // rows[position] if rows[position] else 1
        rows[position] = max(1, min(rows[position], most // max(1, others)))
    return (*rows, shape[-1])


def _convolution(
    op: Node, nodes: Sequence[Node], shapes: list[tuple[int, ...]], weight: tuple[int, ...], index: int
) -> Sizes:
    arguments = arguments_of(op)
    least = [_reach(arguments, weight, axis) for axis in range(len(weight) - 2)]
    batch, channels, *spatial = shapes[0]
    # At least the window if the example is as large: a smaller size needs padding to have a result.
    least = [min(size, low) for size, low in zip(spatial, least, strict=True)]
    batch_divisor, divisor = SMALLER[index]
    batch = _cut(min(batch, 2), index, batch_divisor, 1)
    spatial = [_cut(size, index, divisor, low) for size, low in zip(spatial, least, strict=True)]
    most = PRODUCTS[index > 0] // math.prod(weight)
    while batch * math.prod(spatial) > most and any(map(int.__gt__, spatial, least)):
        widest = max(range(len(spatial)), key=lambda axis: spatial[axis] - least[axis])
        spatial[widest] = max(least[widest], spatial[widest] * 3 // 4)
    if len(nodes) == 1:
        return {nodes[0]: (batch, channels, *spatial)}
    # A fused addition: the addend has the size of the result, which only the example's sizes give.
    return _by_batch(nodes, shapes, index)


def _reach(arguments: dict[str, Any], weight: tuple[int, ...], axis: int) -> int:
    """Return the length of the window along ``axis``, plus one."""
    return _along(arguments["dilation"], axis) * (weight[axis + 2] - 1) + 2


def _along(setting: Any, axis: int) -> int:
    return int(setting[axis % len(setting)]) if isinstance(setting, (list, tuple)) else int(setting)


def _by_batch(nodes: Sequence[Node], shapes: list[tuple[int, ...]], index: int) -> Sizes:
    """Vary the first dimension if it is the same for all nodes; other dimensions have a meaning to the op."""
    batches = {shape[0] if shape else None for shape in shapes}
    (batch, *rest) = batches
    if rest or batch is None:
        return dict(zip(nodes, shapes, strict=True))
    values = sum(math.prod(shape[1:]) for shape in shapes)
    least = 1 if all(len(shape) > 1 for shape in shapes) else 2
    size = min(_cut(batch, index, 2, least), max(least, VALUES // max(1, values)))
    return {node: (size, *shape[1:]) for node, shape in zip(nodes, shapes, strict=True)}
