"""Kernels that return floats: integer embeddings, and linear layers that quantize their input dynamically.

Legacy: ``nnq.Embedding``, ``nnq.EmbeddingBag``, ``nnqd.Linear``, ``nniqd.LinearReLU``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from torchq_compat.lower.x86.kernels.kernel_base import (
    Constant,
    Family,
    Floats,
    KernelCall,
    Refusal,
    Site,
)
from torchq_compat.lower.x86.kernels.own_linear import own_dynamic_linear
from torchq_compat.lower.x86.kernels.weighted import pack
from torchq_compat.lower.x86.qdq_operands import arguments_of, constant_of, quantized_weight, rank_of
from torchq_compat.qspecs.qdq import CONVERT_DTYPE, DEQUANTIZE_DYNAMIC
from torchq_compat.support.dtypes import dtype_range
from torchq_compat.support.quantized_tensors import KERNELS, has_float_qparams

__all__ = ["FAMILY"]

ATEN = torch.ops.aten
SUM = 0


def _rows(site: Site) -> Tensor | Refusal | None:
    """Return the weight of an embedding, quantized row by row; None if it is not quantized."""
    weight = quantized_weight(site.graph_module, arguments_of(site.op)["weight"])
    if weight is None:
        return None
    if weight.dtype is not torch.quint8 or not has_float_qparams(weight):
        return Refusal("its weight has no float qparams for each row of uint8")
    return weight


def _embedding(site: Site) -> KernelCall | Refusal | None:
    arguments, weight = arguments_of(site.op), _rows(site)
    if not isinstance(weight, Tensor):
        return weight
    if rank_of(arguments["indices"]) not in (1, 2):
        return Refusal("the kernel takes indices of one or two dimensions")
    packed = KERNELS.embedding_bag_prepack.default(weight)
    args = (Constant(packed), Floats(arguments["indices"]))
    return KernelCall(KERNELS.embedding_byte.default, args, (site.op,), returns_floats=True)


def _embedding_bag(site: Site) -> KernelCall | Refusal | None:
    arguments, weight = arguments_of(site.op), _rows(site)
    if not isinstance(weight, Tensor):
        return weight
    bag = next(iter(site.op.users), None)
    if bag is None or len(site.op.users) > 1 or bag.args[1] != 0:
        return Refusal("more than its bags are read")
    if arguments["mode"] != SUM or arguments["padding_idx"] is not None:
        return Refusal("the kernel sums, and skips no index")
    packed = KERNELS.embedding_bag_prepack.default(weight)
    optional = arguments["offsets"], arguments["per_sample_weights"]
    offsets, weights = (Floats(each) if isinstance(each, Node) else None for each in optional)
    indices, last = Floats(arguments["indices"]), arguments["include_last_offset"]
    args = (Constant(packed), indices, offsets, False, SUM, False, weights, None, last)
    kernel = KERNELS.embedding_bag_byte.default
    return KernelCall(kernel, args, (site.op,), returns_floats=True, stands_for=bag)


def _linear(site: Site) -> KernelCall | Refusal | None:
    return own_dynamic_linear(site) or _dynamic_linear(site) or _half_linear(site)


def _half_linear(site: Site) -> KernelCall | Refusal | None:
    """Return the kernel of a linear whose weight was rounded to float16.

    As in FX it gets the input without its rounding, which is nearer to the float model.
    """
    arguments = arguments_of(site.op)
    weight = constant_of(site.graph_module, _before_half(arguments["weight"]))
    value = _before_half(arguments["input"])
    if weight is None or value is None:
        return None
    bias = constant_of(site.graph_module, arguments["bias"])
    if bias is None and arguments["bias"] is not None:
        return Refusal("its bias is no constant")
    try:
        packed = KERNELS.linear_prepack_fp16.default(weight, bias)
    except RuntimeError as cause:
        return Refusal(f"torch cannot pack its weight for this engine: {str(cause).splitlines()[0]}")
    kernel = KERNELS.linear_dynamic_fp16 if site.relu is None else KERNELS.linear_relu_dynamic_fp16
    return KernelCall(kernel.default, (Floats(value), Constant(packed)), site.covered, returns_floats=True)


def _before_half(node: Any) -> Node | None:
    """Return the value that ``node`` rounds to float16; None if ``node`` does no such rounding."""
    for dtype in (torch.float32, torch.float16):
        if not isinstance(node, Node) or node.target is not CONVERT_DTYPE or node.args[1] is not dtype:
            return None
        node = node.args[0]
    return node if isinstance(node, Node) else None


def _dynamic_linear(site: Site) -> KernelCall | Refusal | None:
    """Return the kernel of a linear after choose_qparams, quantize and dequantize."""
    arguments = arguments_of(site.op)
    dequantize = arguments["input"]
    if not isinstance(dequantize, Node) or dequantize.target is not DEQUANTIZE_DYNAMIC:
        return None
    quantize = dequantize.args[0]
    assert isinstance(quantize, Node)
    source, scale = quantize.args[:2]
    assert isinstance(source, Node)
    assert isinstance(scale, Node)
    choice = scale.args[0]
    assert isinstance(choice, Node)
    _, low, high, _, dtype = choice.args
    if dtype is not torch.uint8:
        return Refusal("the kernel takes inputs of uint8")
    packed = pack(site, KERNELS.linear_prepack.default)
    if isinstance(packed, Refusal):
        return packed
    kernel = KERNELS.linear_dynamic if site.relu is None else KERNELS.linear_relu_dynamic
    reduce_range = (low, high) != dtype_range(dtype)
    args = (Floats(source), Constant(packed), reduce_range)
    return KernelCall(kernel.default, args, site.covered, returns_floats=True)


#: Consulted before the rules of static quantization.
FAMILY = Family(
    {
        ATEN.embedding.default: _embedding,
        ATEN.embedding_bag.padding_idx: _embedding_bag,
        ATEN.linear.default: _linear,
    },
    goes_first=True,
)
