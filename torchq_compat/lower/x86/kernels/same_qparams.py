"""ATen ops that accept quantized tensors themselves and round to the qparams of their input."""

from __future__ import annotations

import torch
from torch.fx import Node

from torchq_compat.lower.x86.kernels.kernel_base import Family, KernelCall, Quantized, Refusal, Site
from torchq_compat.support.upstream import OpOverload

__all__ = ["FAMILY"]

ATEN = torch.ops.aten


def _rule(site: Site) -> KernelCall | Refusal | None:
    """Return the op itself as the kernel, if its result is quantized with the qparams of its input."""
    source = site.op.args[0]
    qparams = site.qparams_of(source)
    if qparams is None or site.qparams is None:
        return Refusal("its input and its result are not both quantized to 8 bits")
    if site.relu is not None:
        return Refusal("it has no kernel with a ReLU")
    if site.op.kwargs:
        return Refusal("it is called with settings the kernel does not have")
    if qparams != site.qparams:
        return Refusal("its result is quantized with other qparams than its input")
    assert isinstance(source, Node)
    assert isinstance(site.op.target, OpOverload)
    return KernelCall(site.op.target, (Quantized(source), *site.op.args[1:]), site.covered)


#: The results of these ops are rounded to the quantization steps of the input.
FAMILY = Family(
    dict.fromkeys(
        (
            ATEN.adaptive_avg_pool1d.default,
            ATEN.adaptive_avg_pool2d.default,
            ATEN.adaptive_avg_pool3d.default,
            ATEN.avg_pool1d.default,
            ATEN.avg_pool2d.default,
            ATEN.avg_pool3d.default,
            ATEN.mean.dim,
            ATEN.hardtanh.default,
            ATEN.relu6.default,
            ATEN.clamp.default,
            ATEN.upsample_nearest2d.vec,
            ATEN.upsample_bilinear2d.vec,
        ),
        _rule,
    )
)
