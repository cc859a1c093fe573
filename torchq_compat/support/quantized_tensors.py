"""Functions on tensors of torch.quint8, qint8 and qint32, which carry their qparams.

torch deprecates these tensors from 2.13 on (https://github.com/pytorch/pytorch/issues/184982). This package
makes them only where a user asks for them, by FX's names, and ``REPLACEMENTS`` says what replaces them when
torch removes them. No converted model has any. Without these tensors this module is imported all the same,
``AVAILABLE`` is False, and its names raise when called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor

from torchq_compat.support.process_state import once
from torchq_compat.support.upstream import make_per_channel_quantized_tensor, make_per_tensor_quantized_tensor
from torchq_compat.support.user_warnings import silenced

#: Where quantized tensors are used -> what replaces them.
REPLACEMENTS = {
    "quantized classes of a user's custom modules": "`takes_floats = True` on the class: it gets floats",
    "`input_quantized_idxs`, `output_quantized_idxs`": "plain integer tensors, which are taken already; "
    "their qparams are in the state_dict",
    "hooks of a converted model's modules": "integers in plain tensors; `explain` has their qparams",
    "`weight()` of a converted module, and states saved by FX": "integers, scales and zero points as three "
    "tensors, as the converted graph has them",
}


class _Absent:
    """A stand-in for a name that this torch no longer has: no operator of a graph is equal to it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self.name}.{name}")

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise RuntimeError(f"this torch has no quantized tensors: it lacks {self.name}")


class _Kernels:
    """The namespace of operators on quantized tensors, which has all names."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.ops.quantized, name, None) or _Absent(f"torch.ops.quantized.{name}")


def _of_torch(name: str) -> Any:
    return getattr(torch, name, None) or _Absent(f"torch.{name}")


#: Whether this torch has quantized tensors: without them users' quantized classes get floats.
AVAILABLE = all(
    hasattr(torch, name) for name in ("quint8", "quantize_per_tensor", "quantize_per_channel", "dequantize")
) and hasattr(torch.ops.quantized, "linear")

#: The namespace of operators on quantized tensors.
KERNELS: Any = _Kernels()
#: The quantize functions that FX's graphs call.
QUANTIZE_FUNCTION = _of_torch("quantize_per_tensor")
QUANTIZE_FUNCTIONS = (QUANTIZE_FUNCTION, _of_torch("quantize_per_channel"))

PER_CHANNEL = (torch.per_channel_affine, torch.per_channel_symmetric)
FLOAT_QPARAMS = torch.per_channel_affine_float_qparams

#: (integers, scale, zero point) -> the quantized tensor of these integers.
of_integers: Callable[..., Tensor] = make_per_tensor_quantized_tensor or _Absent(
    "torch._make_per_tensor_quantized_tensor"
)
#: (integers, scales, zero points, axis) -> the quantized tensor of these integers, per channel.
of_integers_per_channel: Callable[..., Tensor] = make_per_channel_quantized_tensor or _Absent(
    "torch._make_per_channel_quantized_tensor"
)


def quantize(values: Tensor, scale: float, zero_point: int, dtype: torch.dtype) -> Tensor:
    """Quantize ``values`` per tensor; ``dtype`` is torch.quint8, qint8 or qint32."""
    spend_deprecation_warning()
    quantized: Tensor = QUANTIZE_FUNCTION(values, scale, zero_point, dtype)
    return quantized


def quantize_per_channel(
    values: Tensor, scales: Tensor, zero_points: Tensor, axis: int, dtype: torch.dtype
) -> Tensor:
    """Quantize ``values`` per channel; ``zero_points`` are floats for an embedding."""
    spend_deprecation_warning()
    quantized: Tensor = QUANTIZE_FUNCTIONS[1](values, scales, zero_points, axis, dtype)
    return quantized


@once
def spend_deprecation_warning() -> None:
    """Trigger and suppress torch's warning about quantized tensors, which it gives once; the users of a model
    did not make these tensors."""
    if not AVAILABLE:
        return
    with silenced(category=UserWarning):
        torch.quantize_per_tensor(torch.zeros(1), 1.0, 0, torch.quint8)
        torch.quantize_per_channel(torch.zeros(1), torch.ones(1), torch.zeros(1), 0, torch.quint8)


def is_quantized(value: object) -> bool:
    """Return whether ``value`` is a tensor that carries qparams."""
    return AVAILABLE and isinstance(value, Tensor) and value.is_quantized


def as_float(value: Tensor) -> Tensor:
    """Dequantize ``value`` if it is quantized; return any other tensor as it is."""
    # torch.jit compiles this function, and does not know ``is_quantized``.
    return value.dequantize() if value.is_quantized else value


def integers_of(quantized: Tensor) -> Tensor:
    """Return the stored integers: torch.uint8, int8 or int32."""
    return quantized.int_repr()


def is_per_channel(quantized: Tensor) -> bool:
    """Return whether ``quantized`` has a scale for each channel, with integers as zero points."""
    return quantized.qscheme() in PER_CHANNEL


def has_float_qparams(quantized: Tensor) -> bool:
    """Return whether ``quantized`` has a scale for each channel, with floats as zero points."""
    return quantized.qscheme() is FLOAT_QPARAMS


def qparams_of(quantized: Tensor) -> tuple[float, int]:
    """Return the scale and zero point of a tensor that is quantized per tensor."""
    return quantized.q_scale(), quantized.q_zero_point()


def channel_qparams(quantized: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and zero points, of shape (channels,); torch may reuse their memory."""
    return quantized.q_per_channel_scales(), quantized.q_per_channel_zero_points()


@contextmanager
def using_engine(engine: str) -> Iterator[None]:
    """Let kernels on quantized tensors be packed for ``engine``; what is packed stays with it."""
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = engine
    try:
        yield
    finally:
        torch.backends.quantized.engine = before


def sums_saturate() -> bool:
    """Return whether this engine's kernels saturate sums of integers over the whole range, as those of x86 do
    on CPUs without VNNI."""
    x = quantize(torch.full((1, 4), 255.0), 1.0, 0, torch.quint8)
    weight = quantize(torch.full((1, 4), 127.0), 1.0, 0, torch.qint8)
    result = KERNELS.linear(x, KERNELS.linear_prepack(weight, None), 1000.0, 0)
    return int(integers_of(result)) < 4 * 255 * 127 // 1000
