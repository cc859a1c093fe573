"""Read the settings of an observer: those of the quantized tensor, and those that a BackendConfig may
constrain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torchao.quantization.pt2e.fake_quantize as pt2e_fake_quantize
import torchao.quantization.pt2e.observer as pt2e_observer
from torch import nn

from torchq_compat.errors import ConfigError
from torchq_compat.support.argument_checks import shown
from torchq_compat.support.dtypes import plain_dtype
from torchq_compat.support.torch_ao import observer as legacy_observer

__all__ = ["FIXED_QPARAMS", "ObserverLimits", "ObserverSettings", "read_settings"]

FIXED_QPARAMS = (legacy_observer.FixedQParamsObserver, pt2e_observer.FixedQParamsObserver)
PER_CHANNEL = (
    torch.per_channel_affine,
    torch.per_channel_symmetric,
    torch.per_channel_affine_float_qparams,
)


@dataclass(frozen=True)
class ObserverLimits:
    """The settings of the user's own observer that a BackendConfig may constrain; None if the observer lacks
    the setting."""

    quant_min: int | None
    quant_max: int | None
    eps: float | None
    fixed_scale: float | None
    fixed_zero_point: int | None

    @classmethod
    def of(cls, made: nn.Module) -> ObserverLimits:
        """Read the limits of an observer, or of the observer inside a fake-quantize."""
        observer: Any = getattr(made, "activation_post_process", made)
        is_fixed = isinstance(observer, FIXED_QPARAMS)
        eps = getattr(observer, "eps", None)
        return cls(
            quant_min=getattr(observer, "quant_min", None),
            quant_max=getattr(observer, "quant_max", None),
            eps=None if eps is None else float(eps),
            fixed_scale=float(observer.scale) if is_fixed else None,
            fixed_zero_point=int(observer.zero_point) if is_fixed else None,
        )


@dataclass(frozen=True)
class ObserverSettings:
    """The settings of an observer for the quantized tensor: plain dtype, range, scheme, axis.

    Attributes:
        declared_dtype: the dtype that the user gave, such as quint4x2 if ``dtype`` is uint8.
    """

    dtype: torch.dtype
    declared_dtype: torch.dtype
    qscheme: torch.qscheme
    quant_min: int | None
    quant_max: int | None
    ch_axis: int | None
    is_dynamic: bool
    is_fake_quantize: bool
    has_fixed_qparams: bool
    reuses_input: bool
    observer_type: type[nn.Module]
    limits: ObserverLimits


def read_settings(made: nn.Module, legacy: nn.Module, setting: str = "qconfig") -> ObserverSettings:
    """Return the settings of ``made``, the torchao observer or fake-quantize translated from ``legacy``.

    Raises:
        ConfigError: the channel axis is no valid axis; names ``setting``.
    """
    source: nn.Module = getattr(made, "activation_post_process", made)
    observed_by: nn.Module = getattr(source, "legacy", source)
    ch_axis = getattr(source, "ch_axis", None)
    qscheme = getattr(source, "qscheme", None) or torch.per_tensor_affine
    if qscheme in PER_CHANNEL and not (isinstance(ch_axis, int) and ch_axis >= 0):
        raise ConfigError(
            f"{setting}: the ch_axis of its per-channel observer must be an int from 0 on, got "
            f"{shown(ch_axis)}.",
            hint="give the dimension of the channels: 0 for the weight of a Linear or Conv.",
        )
    return ObserverSettings(
        dtype=plain_dtype(made.dtype),  # type: ignore[arg-type]
        declared_dtype=legacy.dtype,  # type: ignore[arg-type]
        qscheme=qscheme,
        quant_min=getattr(source, "quant_min", None),
        quant_max=getattr(source, "quant_max", None),
        ch_axis=int(ch_axis) if qscheme in PER_CHANNEL and ch_axis is not None else None,
        is_dynamic=bool(getattr(made, "is_dynamic", False)),
        is_fake_quantize=isinstance(made, pt2e_fake_quantize.FakeQuantizeBase),
        has_fixed_qparams=isinstance(source, pt2e_observer.FixedQParamsObserver),
        reuses_input=isinstance(source, pt2e_observer.ReuseInputObserver),
        observer_type=type(observed_by),
        limits=ObserverLimits.of(legacy),
    )
