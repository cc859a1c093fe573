"""Kernels that give floats: integer embeddings, and linear layers whose input is quantized on the fly.

Legacy: ``nnq.Embedding``, ``nnq.EmbeddingBag``, ``nnqd.Linear``, ``nniqd.LinearReLU``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from torchq_compat.lower.kernels.kernel import Constant, Floats, KernelCall, Refusal, Rule, Site
from torchq_compat.lower.kernels.weighted import pack
from torchq_compat.lower.reading import arguments_of, quantized_weight
from torchq_compat.specs.dtypes import dtype_range

__all__ = ["FLOATING"]

ATEN, KERNELS = torch.ops.aten, torch.ops.quantized
OPS = torch.ops.quantized_decomposed
DYNAMIC_DEQUANTIZE = OPS.dequantize_per_tensor.tensor


def _embedding(site: Site) -> KernelCall | Refusal | None:
    arguments = arguments_of(site.op)
    weight = quantized_weight(site.graph_module, arguments["weight"])
    if weight is None:
        return None
    if weight.dtype is not torch.quint8 or not weight.q_per_channel_zero_points().is_floating_point():
        return Refusal("its weight has no float qparams for each row of uint8")
    packed = KERNELS.embedding_bag_prepack.default(weight)
    args = (Constant(packed), Floats(arguments["indices"]))
    return KernelCall(KERNELS.embedding_byte.default, args, (site.op,), returns_floats=True)


def _dynamic_linear(site: Site) -> KernelCall | Refusal | None:
    """Linear behind choose_qparams, quantize and dequantize."""
    arguments = arguments_of(site.op)
    dequantize = arguments["input"]
    if not isinstance(dequantize, Node) or dequantize.target is not DYNAMIC_DEQUANTIZE:
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


#: Asked before the rules of static quantization.
FLOATING: dict[Any, Rule] = {
    ATEN.embedding.default: _embedding,
    ATEN.linear.default: _dynamic_linear,
}
