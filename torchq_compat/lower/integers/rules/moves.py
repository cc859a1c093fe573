"""Ops that move values, or choose some of them: they run on the integers as they are, of any qparams."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from torchq_compat.annotate.passthrough_ops import preserves_values
from torchq_compat.lower.integers.lowered_graph import LoweredGraph
from torchq_compat.lower.integers.operators import MAX_POOL
from torchq_compat.lower.integers.qdq_graph import (
    CLAMPS,
    SCALARS,
    Integers,
    arguments_of,
    example_value,
    integers_at,
    within,
)
from torchq_compat.qspecs.qparams import PerTensorQParams
from torchq_compat.support.upstream import OpOverload

__all__ = ["COPYING", "clamp", "moved_qparams", "write_move"]

ATEN = torch.ops.aten
POOLS = (ATEN.max_pool1d.default, ATEN.max_pool2d.default, ATEN.max_pool3d.default)
NEAREST = (ATEN.upsample_nearest1d.vec, ATEN.upsample_nearest2d.vec, ATEN.upsample_nearest3d.vec)
PAD, DROPOUT = ATEN.pad.default, ATEN.dropout.default
#: A view of channels-last activations, which convolutions return, may need a copy.
COPYING: dict[Any, Any] = {ATEN.view.default: ATEN.reshape.default}


def moved_qparams(node: Node) -> PerTensorQParams | None:
    """Return the qparams of all values that ``node`` moves; None if it computes, or moves others as well."""
    if not (preserves_values(node) or node.target in NEAREST or node.target is PAD):
        return None
    given = [each for each in node.all_input_nodes if _is_float(example_value(each))]
    found = {source.qparams if (source := integers_at(each)) else None for each in given}
    qparams = found.pop() if len(found) == 1 else None
    if qparams is not None and node.target is PAD and _filled_with(node, qparams) is None:
        return None
    return qparams


def _is_float(value: Any) -> bool:
    """Return whether ``value`` is floats, or not known; sizes and indices are moved by no op."""
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    if isinstance(first, Tensor):
        return first.dtype.is_floating_point
    return not isinstance(first, SCALARS)


def _filled_with(pad: Node, qparams: PerTensorQParams) -> int | None:
    """Return the integer of the value that ``pad`` writes around; None if it lies between two."""
    value = torch.tensor(float(arguments_of(pad)["value"] or 0.0))
    integer = qparams.quantize(value)
    return int(integer) if torch.equal(qparams.dequantize(integer), value) else None


def write_move(lowered: LoweredGraph, node: Node, qparams: PerTensorQParams) -> Node:
    """Write ``node`` on integers before it."""

    def integers(each: Node) -> Node:
        source = integers_at(each)
        return each if source is None else source.node

    arguments = arguments_of(node) if isinstance(node.target, OpOverload) else {}
    source = integers(node.all_input_nodes[0])
    if node.target is DROPOUT:
        return source
    if node.target in POOLS:
        return _max_pool(lowered, source, arguments)
    if node.target in CLAMPS:
        return clamp(lowered, Integers(source, qparams), *CLAMPS[node.target](arguments))
    args, kwargs = map_arg(node.args, integers), map_arg(node.kwargs, integers)
    if node.target is PAD:
        value = _filled_with(node, qparams) if arguments["mode"] == "constant" else None
        args, kwargs = (source, arguments["pad"], arguments["mode"], value), {}
    return lowered.call(COPYING.get(node.target, node.target), *args, **kwargs)


def _max_pool(lowered: LoweredGraph, source: Node, arguments: dict[str, Any]) -> Node:
    kernel = arguments["kernel_size"]

    def each(name: str) -> list[Any]:
        setting = arguments[name]
        listed = list(setting) if isinstance(setting, (list, tuple)) else [setting]
        return listed * len(kernel) if len(listed) == 1 else listed

    stride = each("stride") or list(kernel)
    windows = (list(kernel), stride, each("padding"), each("dilation"))
    return lowered.call(MAX_POOL, source, *windows, arguments["ceil_mode"])


def clamp(lowered: LoweredGraph, source: Integers, low: float | None, high: float | None) -> Node:
    """Write the integers of ``source`` between those of ``low`` and ``high``."""
    narrow = within(source.qparams, low, high)
    return lowered.call(ATEN.clamp.default, source.node, narrow.quant_min, narrow.quant_max)
