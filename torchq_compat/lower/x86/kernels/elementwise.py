"""Activations and normalizations of one quantized tensor whose result has other qparams.

Legacy: ``nnq.Hardswish``, ``nnq.LeakyReLU``, ``nnq.ELU``, ``nnq.Sigmoid``, ``nnq.LayerNorm``, ... .
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchq_compat.lower.x86.kernels.kernel_base import (
    Constant,
    Family,
    KernelCall,
    Quantized,
    Refusal,
    Rule,
    Site,
)
from torchq_compat.lower.x86.qdq_operands import arguments_of, constant_of
from torchq_compat.qspecs.qparams import PerTensorQParams
from torchq_compat.support.quantized_tensors import KERNELS
from torchq_compat.support.upstream import OpOverload

__all__ = ["FAMILY"]

ATEN = torch.ops.aten
Arguments = dict[str, Any]


def _not_quantized(site: Site, input_qparams: PerTensorQParams | None) -> Refusal | None:
    if input_qparams is None or site.qparams is None:
        return Refusal("its input and its result are not both quantized to 8 bits")
    if site.relu is not None:
        return Refusal("it has no kernel with a ReLU")
    if input_qparams.dtype is not site.qparams.dtype:
        return Refusal("its input and its result are quantized to different dtypes")
    return None


def _rule(kernel: OpOverload, between: Callable[[Arguments], tuple[Any, ...]] = lambda _: ()) -> Rule:
    """Return the rule of a kernel called as (input, *between, scale, zero point)."""

    def rule(site: Site) -> KernelCall | Refusal | None:
        arguments = arguments_of(site.op)
        source = site.op.args[0]
        refusal = _not_quantized(site, site.qparams_of(source))
        if refusal is not None:
            return refusal
        constants = _constants(site, between(arguments))
        if constants is None:
            return Refusal("its weight and bias are no float constants")
        assert site.qparams is not None
        args = (Quantized(site.op.args[0]), *constants, site.qparams.scale, site.qparams.zero_point)  # type: ignore[arg-type]
        return KernelCall(kernel, args, site.covered)

    return rule


def _constants(site: Site, values: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return ``values`` with graph nodes replaced by the tensors they read; None if one is no constant."""
    found: list[Any] = []
    for value in values:
        if not isinstance(value, torch.fx.Node):
            found.append(value)
            continue
        constant = constant_of(site.graph_module, value)
        if constant is None:
            return None
        found.append(Constant(constant))
    return tuple(found)


def _elu(site: Site) -> KernelCall | Refusal | None:
    arguments = arguments_of(site.op)
    source = arguments["self"]
    refusal = _not_quantized(site, site.qparams_of(source))
    if refusal is not None or site.qparams is None:
        return refusal
    shape = (arguments["alpha"], arguments["scale"], arguments["input_scale"])
    args = (Quantized(source), site.qparams.scale, site.qparams.zero_point, *shape)
    return KernelCall(KERNELS.elu.default, args, site.covered)


def _fixed(kernel: OpOverload, scale: float, zero_point: int) -> Rule:
    """Return the rule of a kernel whose result always has the same qparams, which are fixed in FX too."""

    def rule(site: Site) -> KernelCall | Refusal | None:
        source = arguments_of(site.op)["self"]
        refusal = _not_quantized(site, site.qparams_of(source))
        if refusal is not None or site.qparams is None:
            return refusal
        if (site.qparams.dtype, site.qparams.scale, site.qparams.zero_point) != (
            torch.uint8,
            scale,
            zero_point,
        ):
            return Refusal(f"the kernel gives scale {scale} and zero point {zero_point} of uint8 only")
        return KernelCall(kernel, (Quantized(source),), site.covered)

    return rule


FAMILY = Family(
    {
        ATEN.sigmoid.default: _rule(KERNELS.sigmoid.default),
        ATEN.softmax.int: _rule(KERNELS.softmax.default, lambda a: (a["dim"],)),
        ATEN.hardswish.default: _rule(KERNELS.hardswish.default),
        ATEN.leaky_relu.default: _rule(KERNELS.leaky_relu.default, lambda a: (a["negative_slope"], False)),
        ATEN.layer_norm.default: _rule(
            KERNELS.layer_norm.default, lambda a: (a["normalized_shape"], a["weight"], a["bias"], a["eps"])
        ),
        ATEN.elu.default: _elu,
        ATEN.tanh.default: _fixed(ATEN.tanh.default, 2 / 256, 128),
        ATEN.hardsigmoid.default: _fixed(ATEN.hardsigmoid.default, 1 / 256, 0),
    },
)
