"""Linear layers and convolutions with integer weights and quantized activations.

Legacy: ``nnq.Linear``, ``nnq.Conv2d`` and their kin, ``nniq.LinearReLU``, ``nniq.ConvReLU2d``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from torchq_compat.lower.kernels.kernel import Constant, KernelCall, Quantized, Refusal, Rule, Site
from torchq_compat.lower.reading import arguments_of, constant_of, quantized_weight, rank_of

__all__ = ["WEIGHTED", "pack"]

ATEN, KERNELS = torch.ops.aten, torch.ops.quantized
CONV = ("stride", "padding", "dilation", "groups")
CONV_TRANSPOSE = ("stride", "padding", "output_padding", "dilation", "groups")


def pack(site: Site, prepack: OpOverload, settings: tuple[Any, ...] = ()) -> Any:
    """The weight and bias of the op at ``site`` packed for the engine in use, or a Refusal."""
    arguments = arguments_of(site.op)
    weight = quantized_weight(site.graph_module, arguments["weight"])
    if weight is None or weight.dtype is not torch.qint8:
        return Refusal("its weight is no constant of int8")
    bias = constant_of(site.graph_module, arguments["bias"])
    if bias is None and arguments["bias"] is not None:
        return Refusal("its bias is no constant")
    if bias is not None and bias.dtype is not torch.float32:
        return Refusal(f"its bias is {bias.dtype}, the kernel takes torch.float32")
    try:
        return prepack(weight, bias, *settings)
    except RuntimeError as cause:
        return Refusal(f"torch cannot pack its weight for this engine: {str(cause).splitlines()[0]}")


def _rule(
    prepack: OpOverload,
    kernel: OpOverload,
    with_relu: OpOverload | None,
    settings: tuple[str, ...],
    ranks: Callable[[int], bool],
) -> Rule:
    def rule(site: Site) -> KernelCall | Refusal | None:
        arguments = arguments_of(site.op)
        refusal = _cannot_take(site, arguments, ranks)
        if refusal is not None:
            return refusal
        chosen = kernel if site.relu is None else with_relu
        if chosen is None:
            return Refusal("it has no kernel with a ReLU")
        packed = pack(site, prepack, tuple(arguments[name] for name in settings))
        if isinstance(packed, Refusal):
            return packed
        assert site.grid is not None
        args = (Quantized(arguments["input"]), Constant(packed), site.grid.scale, site.grid.zero_point)
        return KernelCall(chosen, args, site.covered)

    return rule


def _cannot_take(site: Site, arguments: dict[str, Any], ranks: Callable[[int], bool]) -> Refusal | None:
    grid = site.grid_of(arguments["input"])
    if grid is None:
        return Refusal("its input is not quantized per tensor to 8 bits")
    if site.grid is None:
        return Refusal("its result is not quantized")
    if grid.dtype is not torch.uint8 or site.grid.dtype is not torch.uint8:
        return Refusal("the kernel takes and gives uint8")
    if not ranks(rank_of(arguments["input"])):
        return Refusal("the kernel takes batched inputs only")
    return None


def _conv(name: str, overload: str, rank: int, *, has_relu: bool = True) -> Rule:
    settings = CONV_TRANSPOSE if "transpose" in name else CONV
    relu = getattr(getattr(KERNELS, f"{name}_relu"), overload) if has_relu else None
    prepack = getattr(KERNELS, f"{name}_prepack").default
    return _rule(prepack, getattr(getattr(KERNELS, name), overload), relu, settings, rank.__eq__)


WEIGHTED: dict[Any, Rule] = {
    ATEN.linear.default: _rule(
        KERNELS.linear_prepack.default,
        KERNELS.linear.default,
        KERNELS.linear_relu.default,
        (),
        lambda rank: rank >= 2,
    ),
    ATEN.conv1d.default: _conv("conv1d", "default", 3),
    ATEN.conv2d.default: _conv("conv2d", "new", 4),
    ATEN.conv3d.default: _conv("conv3d", "new", 5),
    ATEN.conv_transpose1d.default: _conv("conv_transpose1d", "default", 3, has_relu=False),
    ATEN.conv_transpose2d.input: _conv("conv_transpose2d", "default", 4, has_relu=False),
    ATEN.conv_transpose3d.input: _conv("conv_transpose3d", "default", 5, has_relu=False),
}
