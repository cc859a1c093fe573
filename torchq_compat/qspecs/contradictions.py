"""Observers whose settings contradict each other: a range beyond the dtype, fixed qparams outside the range.

FX makes the observers, calibrates, and fails in the converted model (``zero_point -128 is below lower
bound``) or clamps to the dtype. PT2E clamps to the range first and then wraps around in the dtype, which is
noise.
"""

from __future__ import annotations

import math

from torchq_compat.errors import ConfigError
from torchq_compat.qspecs.observer_settings import ObserverSettings
from torchq_compat.support.dtypes import PACKED_DTYPES, dtype_name, dtype_range, is_integer

__all__ = ["check_axis", "check_settings"]


def check_settings(settings: ObserverSettings, setting: str) -> None:
    """Refuse ``settings`` that no tensor can be quantized with.

    Raises:
        ConfigError: names ``setting``, the source of ``settings``, and the two that contradict each other.
    """
    if not is_integer(settings.dtype):
        return
    dtype = dtype_name(settings.declared_dtype)
    low, high = _packed_range(settings) or dtype_range(settings.dtype)
    given_low = low if settings.quant_min is None else settings.quant_min
    given_high = high if settings.quant_max is None else settings.quant_max
    if not low <= given_low < given_high <= high:
        raise _range_beyond_dtype(setting, (given_low, given_high), dtype, (low, high))
    scale, zero_point = settings.limits.fixed_scale, settings.limits.fixed_zero_point
    if scale is not None and not (math.isfinite(scale) and scale > 0):
        raise ConfigError(
            f"{setting} has fixed qparams with scale {scale:g}.",
            hint="a scale is the width of one quantization step: give a positive number.",
        )
    if zero_point is not None and not given_low <= zero_point <= given_high:
        raise _fixed_zero_point_out_of_range(setting, zero_point, (given_low, given_high))


def check_axis(settings: ObserverSettings, dimensions: int, place: str) -> None:
    """Refuse a ``ch_axis`` that a tensor of ``dimensions`` dimensions does not have.

    Raises:
        ConfigError: names ``place``, the op and the observed tensor.
    """
    axis = settings.ch_axis
    if axis is not None and not -dimensions <= axis < dimensions:
        raise ConfigError(
            f"{place}: the per-channel observer has ch_axis {axis}, the tensor {dimensions} dimensions.",
            hint="give ch_axis the dimension of the channels: 0 for the weight of a Linear or Conv, 1 for "
            "that of a transposed convolution.",
        )


def _packed_range(settings: ObserverSettings) -> tuple[int, int] | None:
    """Return the range of quint4x2 and quint2x4, which PT2E stores one value to a byte; None for others."""
    if settings.declared_dtype not in PACKED_DTYPES:
        return None
    return (0, 15) if "4x2" in str(settings.declared_dtype) else (0, 3)


def _range_beyond_dtype(
    setting: str, given: tuple[int, int], dtype: str, held: tuple[int, int]
) -> ConfigError:
    return ConfigError(
        f"{setting}: quant_min and quant_max are {given[0]} and {given[1]}, but its dtype {dtype} holds "
        f"{held[0]} to {held[1]}.",
        hint="give a range within the dtype, or the dtype that has the range: qint8 holds -128 to 127, "
        "quint8 0 to 255, qint32 and int16 more.",
    )


def _fixed_zero_point_out_of_range(setting: str, zero_point: int, held: tuple[int, int]) -> ConfigError:
    return ConfigError(
        f"{setting} has fixed qparams with zero point {zero_point}, outside its quant_min and quant_max, "
        f"{held[0]} and {held[1]}.",
        hint="the zero point is the integer that stands for 0.0; give one within the range.",
    )
