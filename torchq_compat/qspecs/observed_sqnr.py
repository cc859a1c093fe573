"""How precisely qparams represent most of the values that a histogram has seen."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

__all__ = ["typical_sqnr"]

#: The share of values that are smaller than the typical value: half of them may be zero after a ReLU.
SHARE = 0.75


def typical_sqnr(module: nn.Module) -> float | None:
    """Return the ratio in dB of a typical value to the rounding noise, from the histogram of ``module`` or of
    an observer inside it; None if there is no histogram.

    The SQNR of all values would hide the case that matters: a few large values, for which all other values
    are rounded coarsely, have most of the power.
    """
    for part in module.modules():
        histogram = getattr(part, "histogram", None)
        if isinstance(histogram, Tensor) and float(histogram.sum()) > 0:
            return _typical_sqnr(part, histogram.double().cpu())
    return None


def _typical_sqnr(observer: nn.Module, counts: Tensor) -> float | None:
    low, high = float(observer.min_val), float(observer.max_val)  # type: ignore[arg-type]
    scale = float(observer.calculate_qparams()[0])  # type: ignore[operator]
    if not all(map(math.isfinite, (low, high, scale))) or high <= low or scale <= 0:
        return None
    width = (high - low) / len(counts)
    sizes, order = (low + width * (torch.arange(len(counts), dtype=torch.float64) + 0.5)).abs().sort()
    typical = float(sizes[(counts[order].cumsum(0) < SHARE * counts.sum()).sum().clamp(max=len(counts) - 1)])
    return 20 * math.log10(typical * math.sqrt(12) / scale) if typical > 0 else None
