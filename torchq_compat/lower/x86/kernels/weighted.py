"""Linear layers and convolutions with integer weights and quantized activations.

Legacy: ``nnq.Linear``, ``nnq.Conv2d`` and related modules, ``nniq.LinearReLU``, ``nniq.ConvReLU2d``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.fx import Node

from torchq_compat.lower.x86.engines import X86_ENGINES, Engine, packing_for
from torchq_compat.lower.x86.kernels.endless_convolutions import may_never_return
from torchq_compat.lower.x86.kernels.followed import follow
from torchq_compat.lower.x86.kernels.kernel_base import (
    Constant,
    Family,
    KernelCall,
    Quantized,
    Refusal,
    Rule,
    Site,
)
from torchq_compat.lower.x86.qdq_operands import (
    arguments_of,
    constant_of,
    quantized_weight,
    rank_of,
)
from torchq_compat.qspecs.qdq import is_dequantize
from torchq_compat.support.quantized_tensors import KERNELS
from torchq_compat.support.upstream import OpOverload

__all__ = ["FAMILY", "pack"]

ATEN = torch.ops.aten
CONV = ("stride", "padding", "dilation", "groups")
Arguments = dict[str, Any]
FBGEMM = Engine("fbgemm")
NEVER_RETURNS = "oneDNN's kernel was seen never to return on such a depthwise convolution"
NOT_CONSTANT = Refusal("its weight is no constant of int8")
#: Return the settings that a convolution is packed with, from its arguments.
Settings = Callable[[Site, Arguments], tuple[Any, ...] | Refusal]


def pack(site: Site, prepack: Callable[..., Any], settings: tuple[Any, ...] = ()) -> Any:
    """Return the weight and bias of the op at ``site`` packed for the engine in use, or a Refusal."""
    arguments = arguments_of(site.op)
    weight = quantized_weight(site.graph_module, arguments["weight"])
    if weight is None or weight.dtype is not torch.qint8:
        return NOT_CONSTANT
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
    prepack: Callable[..., Any],
    kernel: OpOverload,
    with_relu: OpOverload | None,
    read_settings: Settings,
    ranks: Callable[[int | None], bool],
) -> Rule:
    def rule(site: Site) -> KernelCall | Refusal | None:
        arguments = arguments_of(site.op)
        if not is_dequantize(arguments["weight"]):
            return None
        refusal = _cannot_take(site, arguments, ranks)
        if refusal is not None:
            return refusal
        settings = read_settings(site, arguments)
        if isinstance(settings, Refusal):
            return settings
        is_endless = may_never_return(_weight_shape(site, arguments), settings)
        if is_endless and site.follower is not None:
            return Refusal(NEVER_RETURNS)
        with packing_for(FBGEMM) if is_endless else nullcontext():
            packed = pack(site, prepack, settings)
        if isinstance(packed, Refusal):
            return packed
        assert site.qparams is not None
        source, qparams = Quantized(arguments["input"]), (site.qparams.scale, site.qparams.zero_point)
        if site.follower is not None:
            return follow(site, source, Constant(packed), qparams)
        chosen = kernel if site.relu is None else with_relu
        if chosen is None:
            return Refusal("it has no kernel with a ReLU")
        note = f"packed for fbgemm: {NEVER_RETURNS}" if is_endless else ""
        return KernelCall(chosen, (source, Constant(packed), *qparams), site.covered, note=note)

    return rule


def _weight_shape(site: Site, arguments: Arguments) -> tuple[int, ...]:
    integers = constant_of(site.graph_module, arguments["weight"].args[0])
    return () if integers is None else tuple(integers.shape)


def _cannot_take(site: Site, arguments: Arguments, ranks: Callable[[int | None], bool]) -> Refusal | None:
    qparams = site.qparams_of(arguments["input"])
    if qparams is None:
        return Refusal("its input is not quantized per tensor to 8 bits")
    if site.qparams is None:
        return Refusal("its result is not quantized" + _before_what(site.op))
    if qparams.dtype is not torch.uint8 or site.qparams.dtype is not torch.uint8:
        return Refusal("the kernel takes and gives uint8")
    if not ranks(rank_of(site.op)):
        return Refusal("the kernel takes batched inputs only")
    return None


def _before_what(op: Node) -> str:
    """Return the op that reads the result in floats, for messages: it is fused with ``op`` in the backend
    config."""
    readers = [str(user.target) for user in op.users if user.op == "call_function"]
    return f", but computed on by {readers[0]}" if len(readers) == 1 else ""


def _conv(name: str, overload: str, rank: int, read_settings: Settings) -> Rule:
    kernel, with_relu = (getattr(getattr(KERNELS, each), overload) for each in (name, f"{name}_relu"))
    prepack = getattr(KERNELS, f"{name}_prepack").default
    return _rule(prepack, kernel, with_relu, read_settings, lambda found: found == rank)


def _conv_transpose(name: str, rank: int) -> Rule:
    """Return a rule that packs for fbgemm on every x86 engine: the engine x86 packs transposed convolutions
    with different numbers of input and output channels wrongly."""
    settings = ("stride", "padding", "output_padding", "dilation", "groups")
    prepack_here = getattr(KERNELS, f"{name}_prepack").default

    def prepack(*args: Any) -> Any:
        is_x86 = torch.backends.quantized.engine in X86_ENGINES
        with packing_for(FBGEMM) if is_x86 else nullcontext():
            return prepack_here(*args)

    return _rule(
        prepack, getattr(KERNELS, name).default, None, _named(*settings), lambda found: found == rank
    )


def _named(*settings: str) -> Settings:
    return lambda _, arguments: tuple(arguments[name] for name in settings)


def _padding_by_name(site: Site, arguments: Arguments) -> tuple[Any, ...] | Refusal:
    """Return the settings with ``padding="same"`` and ``"valid"`` as numbers."""
    weight, dilation = quantized_weight(site.graph_module, arguments["weight"]), arguments["dilation"]
    if weight is None:
        return NOT_CONSTANT
    wanted = [d * (size - 1) for d, size in zip(dilation, weight.shape[2:], strict=True)]
    if arguments["padding"] == "valid":
        wanted = [0] * len(wanted)
    if any(total % 2 for total in wanted):
        return Refusal("it pads one side more than the other")
    padding = [total // 2 for total in wanted]
    return arguments["stride"], padding, dilation, arguments["groups"]


FAMILY = Family(
    {
        ATEN.linear.default: _rule(
            KERNELS.linear_prepack.default,
            KERNELS.linear.default,
            KERNELS.linear_relu.default,
            _named(),
            lambda rank: rank is not None and rank >= 2,
        ),
        ATEN.conv1d.default: _conv("conv1d", "default", 3, _named(*CONV)),
        ATEN.conv2d.default: _conv("conv2d", "new", 4, _named(*CONV)),
        ATEN.conv3d.default: _conv("conv3d", "new", 5, _named(*CONV)),
        ATEN.conv1d.padding: _conv("conv1d", "default", 3, _padding_by_name),
        ATEN.conv2d.padding: _conv("conv2d", "new", 4, _padding_by_name),
        ATEN.conv3d.padding: _conv("conv3d", "new", 5, _padding_by_name),
        ATEN.conv_transpose1d.default: _conv_transpose("conv_transpose1d", 3),
        ATEN.conv_transpose2d.input: _conv_transpose("conv_transpose2d", 4),
        ATEN.conv_transpose3d.input: _conv_transpose("conv_transpose3d", 5),
    },
    is_asked_always=True,
)
