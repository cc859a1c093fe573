"""q-dq nodes: the only module that names, recognizes and inserts the ``quantized_decomposed`` operators.

A *static* node has its qparams in the graph, as literals per tensor and as constants per channel; a *dynamic*
node reads the qparams that ``CHOOSE_QPARAMS`` computes from the tensor in each run. ``QParams``
(``qparams.py``) are the values: ``PerTensorQParams.of_node`` reads them from a node; they quantize tensors.
"""

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.node import map_arg
from torchao.quantization.pt2e.constant_fold import replace_node_with_constant

from torchq_compat.ops import draws, those
from torchq_compat.support.graph_nodes import attribute_of, constant_of, free_name, give_back_freed, source_of
from torchq_compat.support.process_state import held, is_compiling
from torchq_compat.support.upstream import OpOverload  # The import registers quantized_decomposed.

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

#: The operators that convert floats to static integers, and back.
STATIC_QUANTIZES = (QUANTIZE, QUANTIZE_PER_CHANNEL)
DEQUANTIZES = (DEQUANTIZE, DEQUANTIZE_PER_CHANNEL)
#: Makes a node that reads a tensor, given a name for it.
MakeConstant = Callable[[str, Tensor], Node]
#: The least and the largest integer.
Range = tuple[int, int]


def embedding_byte() -> Any:
    """Return the operator that looks up rows of an integer table and dequantizes them; it exists once
    ExecuTorch is imported."""
    return _OPS.embedding_byte.default


def is_qdq(node: Node) -> bool:
    """Return whether ``node`` quantizes, dequantizes, or chooses qparams for that."""
    return getattr(node.target, "namespace", "") == NAMESPACE


def is_dequantize(node: Any) -> bool:
    """Return whether ``node`` is a static dequantize."""
    return isinstance(node, Node) and node.target in DEQUANTIZES


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
    graph: Graph, source: Node, chosen: Range, limits: Range, eps: float, dtype: torch.dtype
) -> Node:
    """Insert nodes that choose qparams for ``source``, quantize and dequantize it.

    Args:
        graph: the graph of ``source``.
        source: a node whose value is floats.
        chosen: the integers over which the range of the tensor is spread.
        limits: the integers to which the quantize clamps.
        eps: the smallest scale.
        dtype: the dtype of the integers.

    Returns:
        The dequantize.
    """
    qparams = graph.call_function(CHOOSE_QPARAMS, (source, *chosen, eps, dtype))
    scale, zero_point = (graph.call_function(operator.getitem, (qparams, index)) for index in range(2))
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


# Weights as integers: each is folded by itself, in blocks, and its floats are dropped before the next.


#: As many elements are converted at a time: what is computed in between is a multiple of them.
BLOCK = 1 << 18
#: Weights of more elements leave holes worth giving back.
LARGE = 4 * BLOCK
#: The end of the name of what a weight is multiplied by to fold a batch norm into it.
FOLDED_SCALE = "_folded_scale"


def in_blocks(function: Callable[..., Tensor], values: Tensor, axis: int, *of_channels: Tensor) -> Tensor:
    """Return ``function(values, *of_channels)``, which has the shape of ``values``, computed in blocks.

    Args:
        axis: the dimension of the blocks.
        of_channels: tensors with one element for each index along ``axis``.
    """
    if values.numel() <= BLOCK:
        return function(values, *of_channels)
    size = values.shape[axis]
    step, result = max(1, BLOCK * size // values.numel()), None
    for start in range(0, size, step):
        count = min(step, size - start)
        block = values.narrow(axis, start, count)
        part = function(block, *(of_channel.narrow(0, start, count) for of_channel in of_channels))
        result = torch.empty_like(values, dtype=part.dtype) if result is None else result
        result.narrow(axis, start, count).copy_(part)
        give_back_freed()
    assert result is not None
    return result


def fold_weights(graph_module: GraphModule) -> None:
    """Fold the quantize of each constant that the graph does not write to, or that is computed of such, and
    delete the constants that nothing else reads."""
    graph = graph_module.graph
    readers = Counter(str(node.target) for node in graph.find_nodes(op="get_attr"))
    operators = [node for node in graph.nodes if isinstance(node.target, OpOverload) and node.args]
    written = {_base(node.args[0]) for node in operators if node.target._schema.is_mutable}
    constants: set[Node] = set()
    for node in list(graph.nodes):
        if _is_constant(graph_module, node, constants, written):
            constants.add(node)
        if node.target in STATIC_QUANTIZES and node.args[0] in constants:
            folded = _fold_quantize(graph_module, node)
        elif is_scaled_weight(node) and any(user.target not in STATIC_QUANTIZES for user in node.users):
            folded = constant_value(graph_module, node)
        else:
            continue
        inputs = node.all_input_nodes
        replace_node_with_constant(graph_module, node, folded)
        for item in inputs:
            _drop_unread(graph_module, item, readers)
        if folded.numel() > LARGE:
            give_back_freed()


def _fold_quantize(graph_module: GraphModule, node: Node) -> Tensor:
    """Return the integers of the constant that ``node`` quantizes, a product with the factor of a batch norm
    block by block."""
    source = source_of(node)
    settings: Any = map_arg(node.args[1:], partial(constant_value, graph_module))
    if not is_scaled_weight(source):
        return run_in_blocks(node, (constant_value(graph_module, source), *settings))
    weight, factor = (constant_value(graph_module, item) for item in source.all_input_nodes)
    is_per_channel = node.target is QUANTIZE_PER_CHANNEL
    axis = settings[2] if is_per_channel else max(range(factor.dim()), key=factor.shape.__getitem__)
    if not factor.numel() == factor.shape[axis] == weight.shape[axis]:
        return run_in_blocks(node, (weight * factor, *settings))
    of_channels, others = (settings[:2], settings[2:]) if is_per_channel else ((), settings)
    shape, quantize = [-1 if index == axis else 1 for index in range(factor.dim())], node.target

    def of_block(block: Tensor, part: Tensor, *qparams: Tensor) -> Tensor:
        result: Tensor = quantize(block * part.view(shape), *qparams, *others)  # type: ignore[operator]
        return result

    return in_blocks(of_block, weight, axis, factor.flatten(), *of_channels)


def _base(node: Any) -> str:
    """Return the name of the tensor that ``node`` is a view of."""
    while isinstance(node, Node) and node.op == "call_function" and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return str(node.target) if isinstance(node, Node) else ""


def _is_constant(graph_module: GraphModule, node: Node, constants: set[Node], written: set[str]) -> bool:
    """Return whether ``node`` is a tensor that is not ``written``, or computed of ``constants`` alone."""
    if node.op == "get_attr":
        return str(node.target) not in written and isinstance(attribute_of(graph_module, node), Tensor)
    return (
        isinstance(node.target, OpOverload)
        and not is_qdq(node)
        and not draws(node)
        and bool(node.all_input_nodes)
        and constants.issuperset(node.all_input_nodes)
    )


def _drop_unread(graph_module: GraphModule, node: Node, readers: Counter[str]) -> None:
    """Erase ``node``, and what only it reads, if nothing reads it."""
    if node.users:
        return
    inputs = node.all_input_nodes
    graph_module.graph.erase_node(node)
    if node.op == "get_attr":
        target = str(node.target)
        readers[target] -= 1
        if not readers[target]:
            path, _, name = target.rpartition(".")
            delattr(graph_module.get_submodule(path), name)
    for item in inputs:
        _drop_unread(graph_module, item, readers)


def run_in_blocks(node: Node, arguments: Sequence[Any]) -> Tensor:
    """Return the result of the static quantize or dequantize at ``node`` for the values of its arguments."""
    kwargs: Any = node.kwargs
    return called_in_blocks(node.target, *arguments, **kwargs)


def called_in_blocks(operator_call: Any, values: Tensor, *settings: Any, **kwargs: Any) -> Tensor:
    """Return the result of a static quantize or dequantize; in a trace, it is the one call that it looks."""
    if is_compiling() or torch._C._is_tracing():
        result: Tensor = operator_call(values, *settings, **kwargs)
        return result
    is_per_channel = operator_call in (QUANTIZE_PER_CHANNEL, DEQUANTIZE_PER_CHANNEL)
    of_channels, axis = (settings[:2], settings[2]) if is_per_channel else ((), 0)
    if operator_call is DEQUANTIZE_PER_CHANNEL and not settings[1].any():
        # The same bits: torch subtracts in int64, which takes 30 times as long.
        of_channels, settings = settings[:1], (settings[0], None, *settings[2:])
    others = settings[len(of_channels) :]
    return in_blocks(
        lambda block, *qparams: operator_call(block, *qparams, *others, **kwargs), values, axis, *of_channels
    )


def is_scaled_weight(node: Node) -> bool:
    """Return whether ``node`` folds a batch norm into a weight."""
    scale = node.args[1] if node.target is torch.ops.aten.mul.Tensor else None
    return isinstance(scale, Node) and str(scale.target).endswith(FOLDED_SCALE)


def constant_value(graph_module: GraphModule, node: Node) -> Tensor:
    """Return the value of a node that is computed of constants."""
    if node.op == "get_attr":
        value = constant_of(graph_module, node).detach()
    else:
        args, kwargs = map_arg((node.args, node.kwargs), partial(constant_value, graph_module))
        with torch.no_grad():
            value = node.target(*args, **kwargs)  # type: ignore[operator]
    assert isinstance(value, Tensor)
    return value


EMBEDDING = torch.ops.aten.embedding.default


def dequantizes_constant(node: Node) -> bool:
    return node.target in DEQUANTIZES and source_of(node).op == "get_attr"


_IS_WEIGHT_BY_WEIGHT: ContextVar[bool] = ContextVar("torchq_compat_weight_by_weight", default=False)


class WeightByWeight(Interpreter):
    """Runs a q-dq graph, and dequantizes of each weight what is read, when it is read."""

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        with held(_IS_WEIGHT_BY_WEIGHT, True):
            return super().call_module(target, args, kwargs)

    def run_node(self, n: Node) -> Any:
        if dequantizes_constant(n):
            return None
        weights = [source for source in n.all_input_nodes if dequantizes_constant(source)]
        result = self._read(n, weights) if weights else super().run_node(n)
        if n.op == "call_module":  # It had the floats of its weights.
            give_back_freed()
        return result

    def _read(self, n: Node, weights: list[Node]) -> Any:
        args, _ = self.fetch_args_kwargs_from_env(n)
        operator_call: Any = n.target
        weight, is_only = weights[0], len(weights) == 1 and not n.kwargs
        if is_only and _has_rows(weight) and n.target is EMBEDDING and n.args[0] is weight:
            rows, places = args[1].unique(return_inverse=True)
            return operator_call(self._floats(weight, rows), places, *args[2:])
        # Their results have a channel for each row of the weight.
        if (
            is_only
            and _has_rows(weight)
            and n.target in those("linear", "convolution")
            and n.args[1] is weight
            and args[6:] in ((), (1,))
        ):
            integers = self.fetch_attr(str(source_of(weight).target))
            step = max(1, BLOCK * len(integers) // max(1, integers.numel()))
            blocks = [slice(start, start + step) for start in range(0, len(integers), step)]
            biases = [args[2][block] if args[2:3] not in ((), (None,)) else None for block in blocks]
            results = []
            for block, bias in zip(blocks, biases, strict=True):
                results.append(operator_call(args[0], self._floats(weight, block), bias, *args[3:]))
                if len(blocks) > 1:
                    give_back_freed()
            return results[0] if len(results) == 1 else torch.cat(results, dim=1 - integers.dim())
        self.env.update({item: self._floats(item) for item in weights})
        try:
            return super().run_node(n)
        finally:
            self.env.update(dict.fromkeys(weights))

    def _floats(self, weight: Node, index: Any = None) -> Tensor:
        """Return the floats of ``weight``, or of some of its rows."""
        args = [self.fetch_attr(str(arg.target)) if isinstance(arg, Node) else arg for arg in weight.args]
        if index is not None:
            args = [arg[index] if isinstance(arg, Tensor) else arg for arg in args]
        return run_in_blocks(weight, args)


def are_large_read_one_by_one(weights: Iterable[Tensor]) -> bool:
    """Return whether the call is one by ``WeightByWeight``, outside of tracing, and ``weights`` are large."""
    is_on = not is_compiling() and _IS_WEIGHT_BY_WEIGHT.get()
    return is_on and sum(weight.numel() for weight in weights) > LARGE


def weight_by_weight(graph_module: GraphModule, graph: Graph | None = None) -> Callable[..., Any] | None:
    """Return how to run ``graph``, or its own one, on the state of ``graph_module``, if the call is one by
    ``WeightByWeight`` and a weight is large."""
    if is_compiling() or not _IS_WEIGHT_BY_WEIGHT.get():
        return None
    is_large = any(buffer.numel() > LARGE for buffer in graph_module.buffers())
    return WeightByWeight(graph_module, graph=graph).run if is_large else None


def _has_rows(weight: Node) -> bool:
    return bool(weight.target is DEQUANTIZE or weight.args[3] == 0)
