"""Ops of two quantized tensors. Legacy: ``torch.ops.quantized.add``, ``mul``, ``matmul`` and ``cat``."""

from __future__ import annotations

import torch
from torch.fx import Node

from torchq_compat.lower.x86.kernels.kernel_base import Family, KernelCall, Quantized, Refusal, Rule, Site
from torchq_compat.lower.x86.qdq_operands import arguments_of, rank_of
from torchq_compat.support.quantized_tensors import KERNELS
from torchq_compat.support.upstream import OpOverload

__all__ = ["FAMILY"]

ATEN = torch.ops.aten


def _rule(kernel: OpOverload, with_relu: OpOverload | None) -> Rule:
    def rule(site: Site) -> KernelCall | Refusal | None:
        left, right = site.op.args[:2]
        if not isinstance(left, Node) or not isinstance(right, Node):
            return Refusal("one of its arguments is a number")
        if arguments_of(site.op).get("alpha", 1) != 1:
            return Refusal("the kernel has no alpha")
        dtypes = {
            qparams and qparams.dtype
            for qparams in (site.qparams_of(left), site.qparams_of(right), site.qparams)
        }
        if None in dtypes or len(dtypes) > 1:
            return Refusal("its inputs and its result are not quantized to one 8-bit dtype")
        chosen = kernel if site.relu is None else with_relu
        if chosen is None:
            return Refusal("it has no kernel with a ReLU")
        if kernel is KERNELS.matmul.default and rank_of(left) != rank_of(right):
            return Refusal("the kernel takes matrices of equal rank")
        assert site.qparams is not None
        args = (Quantized(left), Quantized(right), site.qparams.scale, site.qparams.zero_point)
        return KernelCall(chosen, args, site.covered)

    return rule


def _cat(site: Site) -> KernelCall | Refusal | None:
    arguments = arguments_of(site.op)
    pieces = arguments["tensors"]
    dtypes = {qparams and qparams.dtype for qparams in (*map(site.qparams_of, pieces), site.qparams)}
    if site.qparams is None or len(dtypes) > 1:
        return Refusal("its inputs and its result are not quantized to one 8-bit dtype")
    chosen = KERNELS.cat.default if site.relu is None else KERNELS.cat_relu.default
    listed = [Quantized(piece) for piece in pieces]
    args = (listed, arguments["dim"], site.qparams.scale, site.qparams.zero_point)
    return KernelCall(chosen, args, site.covered)


FAMILY = Family(
    {
        ATEN.add.Tensor: _rule(KERNELS.add.default, KERNELS.add_relu.default),
        ATEN.mul.Tensor: _rule(KERNELS.mul.default, KERNELS.mul_relu.default),
        ATEN.matmul.default: _rule(KERNELS.matmul.default, None),
        ATEN.cat.default: _cat,
    },
)
