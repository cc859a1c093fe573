"""A linear layer or a convolution fused with the next op into one kernel of the onednn engine.

Legacy: ``nniq.ConvAdd2d``, ``nniq.ConvAddReLU2d``, ``nniq.LinearLeakyReLU``, ``nniq.LinearTanh`` of
``get_onednn_backend_config``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from torchq_compat.lower.x86.kernels.kernel_base import Constant, KernelCall, Quantized, Refusal, Site
from torchq_compat.lower.x86.qdq_operands import arguments_of, example_value
from torchq_compat.support.quantized_tensors import KERNELS
from torchq_compat.support.upstream import OpOverload

__all__ = ["follow", "followed_by"]

ATEN = torch.ops.aten
CONV2D = (ATEN.conv2d.default, ATEN.conv2d.padding)
#: First op -> the next ops that a kernel computes along with it.
FOLLOWERS: dict[Any, tuple[OpOverload, ...]] = {
    **dict.fromkeys(CONV2D, (ATEN.add.Tensor,)),
    ATEN.linear.default: (ATEN.leaky_relu.default, ATEN.tanh.default),
}
ENGINE = "onednn"


def followed_by(op: Node) -> Node | None:
    """Return the one reader of ``op``, if a kernel of the engine in use computes both; else None."""
    if op.target not in FOLLOWERS or torch.backends.quantized.engine != ENGINE or len(op.users) != 1:
        return None
    reader = next(iter(op.users))
    return reader if reader.target in FOLLOWERS[op.target] else None


def follow(
    site: Site, source: Quantized, packed: Constant, qparams: tuple[float, int]
) -> KernelCall | Refusal:
    """Return the kernel for ``site``, whose follower was found by ``followed_by``."""
    assert site.follower is not None
    if site.follower.target is ATEN.add.Tensor:
        return _add(site, source, packed, qparams)
    if site.relu is not None:
        return Refusal("it has no kernel with a ReLU")
    if site.follower.target is ATEN.tanh.default:
        return KernelCall(KERNELS.linear_tanh.default, (source, packed, *qparams), site.covered)
    slope = arguments_of(site.follower)["negative_slope"]
    return KernelCall(KERNELS.linear_leaky_relu.default, (source, packed, *qparams, slope), site.covered)


def _add(site: Site, source: Quantized, packed: Constant, qparams: tuple[float, int]) -> KernelCall | Refusal:
    assert site.follower is not None
    arguments = arguments_of(site.follower)
    others = [each for each in (arguments["self"], arguments["other"]) if each is not site.op]
    added = site.qparams_of(others[0]) if len(others) == 1 else None
    if added is None or arguments["alpha"] != 1:
        return Refusal("what is added to its result is not quantized per tensor to 8 bits")
    if _shape(others[0]) != _shape(site.op):
        return Refusal("what is added to its result has another shape")
    # The kernel overwrites the addend with its result.
    copied = KernelCall(ATEN.clone.default, (Quantized(others[0]),))
    kernel = KERNELS.conv2d_add if site.relu is None else KERNELS.conv2d_add_relu
    return KernelCall(kernel.default, (source, copied, packed, *qparams), site.covered)


def _shape(node: Node) -> str:
    return str(getattr(example_value(node), "shape", node))
