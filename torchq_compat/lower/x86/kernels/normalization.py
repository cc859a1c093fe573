"""Batch and instance normalization of quantized tensors whose result has other qparams.

Legacy: ``nnq.BatchNorm2d``, ``nniq.BNReLU2d``, ``nnq.InstanceNorm2d``, ... .
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchq_compat.lower.x86.kernels.kernel_base import (
    Constant,
    Family,
    KernelCall,
    Quantized,
    Refusal,
    Site,
)
from torchq_compat.lower.x86.qdq_operands import arguments_of, constant_of, rank_of
from torchq_compat.support.quantized_tensors import KERNELS
from torchq_compat.support.upstream import OpOverload

__all__ = ["FAMILY"]

ATEN = torch.ops.aten
#: Rank of the input -> the kernels without and with ReLU.
BATCH_NORMS: dict[int | None, tuple[OpOverload, OpOverload]] = {
    4: (KERNELS.batch_norm2d.default, KERNELS.batch_norm2d_relu.default),
    5: (KERNELS.batch_norm3d.default, KERNELS.batch_norm3d_relu.default),
}


def _batch_norm(site: Site) -> KernelCall | Refusal | None:
    arguments = arguments_of(site.op)
    kernels = BATCH_NORMS.get(rank_of(site.op))
    if kernels is None or arguments["training"]:
        return Refusal("the kernels take inputs of 4 or 5 dimensions, in evaluation")
    names = ("weight", "bias", "running_mean", "running_var")
    return _call(site, arguments, kernels[site.relu is not None], names)


def _instance_norm(site: Site) -> KernelCall | Refusal | None:
    arguments = arguments_of(site.op)
    if site.relu is not None or not arguments["use_input_stats"]:
        return Refusal("the kernel normalizes by the statistics of its input, without ReLU")
    return _call(site, arguments, KERNELS.instance_norm.default, ("weight", "bias"))


def _call(
    site: Site, arguments: dict[str, Any], kernel: OpOverload, names: tuple[str, ...]
) -> KernelCall | Refusal:
    qparams = site.qparams_of(arguments["input"])
    if qparams is None or site.qparams is None or qparams.dtype is not site.qparams.dtype:
        return Refusal("its input and its result are not quantized to one 8-bit dtype")
    given = [arguments[name] for name in names]
    constants = [constant_of(site.graph_module, each) for each in given]
    if [each is None for each in given] != [each is None for each in constants]:
        return Refusal("its parameters are no constants")
    if kernel is not KERNELS.instance_norm.default:
        constants = _with_affine(constants)
    parameters = (Constant(value) if isinstance(value, Tensor) else None for value in constants)
    settings = (arguments["eps"], site.qparams.scale, site.qparams.zero_point)
    return KernelCall(kernel, (Quantized(arguments["input"]), *parameters, *settings), site.covered)


def _with_affine(constants: list[Tensor | None]) -> list[Tensor | None]:
    """Add the weight and bias that ``affine=False`` leaves out; the kernels of batch norm require them."""
    weight, bias, mean, variance = constants
    assert mean is not None
    return [
        torch.ones_like(mean) if weight is None else weight,
        torch.zeros_like(mean) if bias is None else bias,
        mean,
        variance,
    ]


FAMILY = Family(
    {
        ATEN.batch_norm.default: _batch_norm,
        ATEN.instance_norm.default: _instance_norm,
    },
)
