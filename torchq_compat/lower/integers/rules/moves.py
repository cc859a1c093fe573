"""Ops that move, join or average quantized tensors."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from torchq_compat.lower.integers import qdq_graph
from torchq_compat.lower.integers.lowered_graph import Family, Kernel, LoweredGraph, Refusal, Rule, of_result
from torchq_compat.lower.integers.operators import ARITHMETIC, MAX_POOL, MEAN
from torchq_compat.lower.integers.rules.convolutions import per_dimension
from torchq_compat.lower.integers.rules.tables import requantize
from torchq_compat.ops import preserves_values, those
from torchq_compat.read.qparams import PerTensorQParams
from torchq_compat.support.upstream import OpOverload

# Ops that move values, or choose some of them: they run on the integers as they are, of any qparams.


ATEN = torch.ops.aten
PAD, DROPOUT = ATEN.pad.default, ATEN.dropout.default


def copying(target: Any) -> Any:
    """Return ``target``; for a view, which channels-last activations may not allow, what copies if needed."""
    return ATEN.reshape.default if target is ATEN.view.default else target


def moved_qparams(node: Node) -> PerTensorQParams | None:
    """Return the qparams of all values that ``node`` moves; None if it computes, or moves others as well."""
    is_moved = node.target in those("nearest") or node.target is PAD or _keeps_dtype(node)
    if not (is_moved or preserves_values(node)):
        return None
    given = [producer for producer in node.all_input_nodes if _is_float(qdq_graph.example_value(producer))]
    result = {source.qparams if (source := qdq_graph.integers_at(item)) else None for item in given}
    qparams = result.pop() if len(result) == 1 else None
    if qparams is not None and node.target is PAD and _filled_with(node, qparams) is None:
        return None
    return qparams


def _keeps_dtype(node: Node) -> bool:
    """Return whether ``node`` is a cast that hands on what it is given."""
    if node.target not in those("casts"):
        return False
    given, result = map(qdq_graph.example_value, (node.all_input_nodes[0], node))
    if not (isinstance(given, Tensor) and isinstance(result, Tensor)):
        return False
    is_same = (given.dtype, given.device) == (result.dtype, result.device)
    return is_same and qdq_graph.arguments_of(node).get("memory_format") is None


def _is_float(value: Any) -> bool:
    """Return whether ``value`` is floats, or not known; sizes and indices are moved by no op."""
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    if isinstance(first, Tensor):
        return first.dtype.is_floating_point
    return not isinstance(first, qdq_graph.SCALARS)


def _filled_with(pad: Node, qparams: PerTensorQParams) -> int | None:
    """Return the integer of the value that ``pad`` writes around; None if it lies between two."""
    value = torch.tensor(float(qdq_graph.arguments_of(pad)["value"] or 0.0))
    integer = qparams.quantize(value)
    return int(integer) if torch.equal(qparams.dequantize(integer), value) else None


def write_move(lowered: LoweredGraph, node: Node, qparams: PerTensorQParams) -> Node:
    """Write ``node`` on integers before it."""

    def integers(item: Node) -> Node:
        source = qdq_graph.integers_at(item)
        return item if source is None else source.node

    arguments = qdq_graph.arguments_of(node) if isinstance(node.target, OpOverload) else {}
    source = integers(node.all_input_nodes[0])
    if node.target in (DROPOUT, ATEN.alias.default) or _keeps_dtype(node):
        return source
    if node.target in those("max pool"):
        kernel, names = list(arguments["kernel_size"]), ("stride", "padding", "dilation")
        stride, *others = (per_dimension(arguments[name], len(kernel)) for name in names)
        return lowered.call(MAX_POOL, source, kernel, stride or kernel, *others, arguments["ceil_mode"])
    args, kwargs = map_arg(node.args, integers), map_arg(node.kwargs, integers)
    if node.target is PAD:
        value = _filled_with(node, qparams) if arguments["mode"] == "constant" else None
        args, kwargs = (source, arguments["pad"], arguments["mode"], value), {}
    return lowered.call(copying(node.target), *args, **kwargs)


def clamp(lowered: LoweredGraph, source: qdq_graph.Integers, low: float | None, high: float | None) -> Node:
    """Write the integers of ``source`` between those of ``low`` and ``high``."""
    narrow = qdq_graph.within(source.qparams, low, high)
    return lowered.call(ATEN.clamp.default, source.node, narrow.quant_min, narrow.quant_max)


# Ops of several quantized tensors. Legacy: ``torch.ops.quantized.add``, ``mul`` and ``cat``.


NOT_QUANTIZED = Refusal("its result is not quantized to 8 bits")


def _pair_rule(operation: str) -> Rule:
    def rule(site: qdq_graph.OpSite) -> Kernel | Refusal | None:
        given = site.op.args[:2]
        if (
            not all(isinstance(entry, Node) and entry.op != "get_attr" for entry in given)
            or given[0] is given[1]
        ):
            return None  # Of one tensor: a table.
        left, right = map(qdq_graph.integers_at, given)
        if left is None or right is None:
            return Refusal("its inputs are not both quantized per tensor to 8 bits")
        if site.arguments.get("alpha", 1) != 1:
            return Refusal("the kernel has no alpha")
        qparams = site.result.qparams
        if qparams is None:
            return NOT_QUANTIZED

        def write(lowered: LoweredGraph) -> Node:
            return lowered.call(ARITHMETIC, *left.arguments, *right.arguments, operation, *of_result(qparams))

        return Kernel(str(ARITHMETIC), write)

    return rule


def _cat(site: qdq_graph.OpSite) -> Kernel | Refusal | None:
    given = site.arguments["tensors"]
    pieces = [qdq_graph.integers_at(item) for item in given] if isinstance(given, (list, tuple)) else [None]
    qparams = site.result.qparams
    if any(piece is None for piece in pieces):
        return Refusal("its inputs are not all quantized per tensor to 8 bits")
    if qparams is None:
        return None if len({piece.qparams for piece in pieces if piece}) == 1 else NOT_QUANTIZED

    def write(lowered: LoweredGraph) -> Node:
        moved = [requantize(lowered, piece, qparams) for piece in pieces if piece is not None]
        return lowered.call(site.op.target, moved, site.arguments["dim"])

    return Kernel(f"{site.op.target} on integers", write)


PAIRS = Family(
    {
        ATEN.add.Tensor: _pair_rule("add"),
        ATEN.sub.Tensor: _pair_rule("sub"),
        ATEN.mul.Tensor: _pair_rule("mul"),
        ATEN.div.Tensor: _pair_rule("div"),
        ATEN.maximum.default: _pair_rule("maximum"),
        ATEN.minimum.default: _pair_rule("minimum"),
        ATEN.cat.default: _cat,
    }
)


# Means over dimensions of a quantized tensor, and pools of one average. Legacy: FX calls ATen's kernels on
# quantized tensors, which keep the qparams of the input.


def _mean_rule(dims_of: Callable[[dict[str, Any]], Sequence[int] | None]) -> Rule:
    def rule(site: qdq_graph.OpSite) -> Kernel | Refusal | None:
        source, qparams = qdq_graph.integers_at(site.arguments["self"]), site.result.qparams
        if source is None or qparams is None or site.arguments.get("dtype") is not None:
            return Refusal("its input and its result are not both quantized per tensor to 8 bits")
        dims = dims_of(site.arguments)
        if dims is None:
            return Refusal("it has no integer kernel for more than one average")

        def write(lowered: LoweredGraph) -> Node:
            keeps = bool(site.arguments.get("keepdim", True))
            return lowered.call(MEAN, *source.arguments, list(dims), keeps, *of_result(qparams))

        return Kernel(str(MEAN), write)

    return rule


def _of_pool(arguments: dict[str, Any]) -> Sequence[int] | None:
    sizes = arguments["output_size"]
    return [index - len(sizes) for index in range(len(sizes))] if all(size == 1 for size in sizes) else None


MEANS = Family(
    {
        ATEN.mean.dim: _mean_rule(lambda arguments: arguments["dim"]),
        **dict.fromkeys(those("average pool"), _mean_rule(_of_pool)),
    }
)
