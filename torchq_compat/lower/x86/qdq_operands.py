"""Read a q-dq graph: arguments by name, qparams, constants, quantized weights."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchq_compat.qspecs.qdq import DEQUANTIZE, DEQUANTIZES, QUANTIZE, is_dequantize
from torchq_compat.qspecs.qparams import PerTensorQParams
from torchq_compat.support import metadata
from torchq_compat.support.dtypes import KERNEL_DTYPES, dtype_range
from torchq_compat.support.quantized_tensors import of_integers, of_integers_per_channel
from torchq_compat.support.upstream import (
    OpOverload,
)

__all__ = [
    "SCALARS",
    "SIZE_OPS",
    "arguments_of",
    "constant_of",
    "example_value",
    "has_kernels",
    "is_integers",
    "is_whole_range",
    "observed_range",
    "quantized_weight",
    "rank_of",
    "takes_and_returns_tensors",
    "tensor_inputs",
]

ATEN = torch.ops.aten
#: Ops that read shapes, never values.
SIZE_OPS = (ATEN.sym_size.int, ATEN.sym_numel.default, ATEN.sym_stride.int)
SCALARS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


def arguments_of(node: Node) -> dict[str, Any]:
    """Return the arguments of an operator call by name, defaults included."""
    assert isinstance(node.target, OpOverload)
    found: dict[str, Any] = {}
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.name in node.kwargs:
            found[argument.name] = node.kwargs[argument.name]
        elif not argument.kwarg_only and position < len(node.args):
            found[argument.name] = node.args[position]
        elif argument.has_default_value():
            found[argument.name] = argument.default_value
    return found


def tensor_inputs(node: Node) -> list[Node]:
    """Return the inputs of an operator call that are tensors; the other inputs are sizes."""
    return [source for source in node.all_input_nodes if not isinstance(example_value(source), SCALARS)]


def rank_of(node: Node) -> int | None:
    """Return the number of dimensions of the tensor at ``node``; None if torchao left no example value."""
    value = example_value(node)
    return value.dim() if isinstance(value, Tensor) else None


def example_value(node: Node) -> Any:
    """Return the example value at ``node``, or of its input for q-dq nodes, which torchao gives none."""
    while "val" not in node.meta and node.target in (QUANTIZE, *DEQUANTIZES):
        source = node.args[0]
        assert isinstance(source, Node)
        node = source
    return node.meta.get("val")


def observed_range(node: Node, qparams: PerTensorQParams) -> tuple[int, int]:
    """Return the least and the largest integer that the values at ``node``, with ``qparams``, had while
    observed: the whole range, or half of it under ``reduce_range``. A graph that does not record it, such as
    a stored one, is assumed to use half."""
    while not metadata.OBSERVED_RANGE.is_on(node):
        if not node.all_input_nodes or node.op != "call_function":
            low, high = dtype_range(qparams.dtype)
            half = (low, low + (high - low) // 2) if low == 0 else (low // 2, high // 2)
            return max(half[0], qparams.quant_min), min(half[1], qparams.quant_max)
        node = node.all_input_nodes[0]
    low, high = metadata.OBSERVED_RANGE.required(node)
    return max(low, qparams.quant_min), min(high, qparams.quant_max)


def has_kernels(qparams: PerTensorQParams) -> bool:
    """Return whether torch's quantized tensors can have ``qparams``."""
    return qparams.dtype in KERNEL_DTYPES


def is_whole_range(qparams: PerTensorQParams) -> bool:
    """Return whether ``qparams`` saturate exactly where their dtype does."""
    return (qparams.quant_min, qparams.quant_max) == dtype_range(qparams.dtype)


def is_integers(node: Node) -> bool:
    """Return whether the reference graph holds quantized integers at ``node``."""
    if node.target is QUANTIZE or metadata.INTEGERS.of(node) is not None:
        return True
    return node.op == "placeholder" and any(user.target is DEQUANTIZE for user in node.users)


def constant_of(graph_module: GraphModule, node: Any) -> Tensor | None:
    """Return the tensor that a ``get_attr`` node reads; None for any other node."""
    if not isinstance(node, Node) or node.op != "get_attr":
        return None
    value = operator.attrgetter(str(node.target))(graph_module)
    return value.detach() if isinstance(value, Tensor) else None


def quantized_weight(graph_module: GraphModule, node: Any) -> Tensor | None:
    """Return the torch.ao quantized tensor of a constant integer weight that ``node`` dequantizes; None if
    ``node`` does not dequantize such a weight."""
    if not is_dequantize(node):
        return None
    integers = constant_of(graph_module, node.args[0])
    if integers is None or integers.device.type != "cpu" or integers.dtype not in KERNEL_DTYPES:
        return None
    if node.target is DEQUANTIZE:
        return of_integers(integers, *_per_tensor(node.args))
    scales, zero_points = (constant_of(graph_module, arg) for arg in node.args[1:3])
    if scales is None or zero_points is None:
        return None
    if not zero_points.is_floating_point():
        scales = scales.double()
    return of_integers_per_channel(integers, scales, zero_points, _axis(node.args))


def _per_tensor(args: Any) -> tuple[float, int]:
    return float(args[1]), int(args[2])


def _axis(args: Any) -> int:
    return int(args[3])


def takes_and_returns_tensors(graph_module: GraphModule) -> bool:
    """Return whether every argument of a captured model is one tensor, and its result too."""
    info = getattr(graph_module.graph._codegen, "pytree_info", None)
    if info is None:
        return False
    args, kwargs = info.in_spec.children()
    arguments_are_leaves = all(child.is_leaf() for child in args.children())
    return arguments_are_leaves and kwargs.num_leaves == 0 and bool(info.out_spec.is_leaf())
