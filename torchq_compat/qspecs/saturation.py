"""Moving-average observers that count the values outside their range.

Over the steps of a sequence, a moving average converges to the mean range of a step, which is narrower than
the range of all values. The qparams are torchao's, bit for bit; the count shows the loss in ``explain``.
"""

from __future__ import annotations

import math
from ctypes import c_float
from typing import Any

import torch
from torch import Tensor, nn
from torchao.quantization.pt2e.observer import MovingAverageMinMaxObserver

from torchq_compat.qspecs.torch_ao_subclasses import recognised_by_torch_ao

__all__ = ["SaturationCountingObserver", "saturated_share"]


@recognised_by_torch_ao
class SaturationCountingObserver(MovingAverageMinMaxObserver):  # type: ignore[misc]
    """torchao's MovingAverageMinMaxObserver that counts values outside its range while observing.

    Buffers: ``seen`` and ``saturated``, float64 counts of shape ().
    """

    seen: Tensor
    saturated: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.register_buffer("saturated", torch.zeros((), dtype=torch.float64))

    def forward(self, x_orig: Tensor) -> Tensor:
        values = x_orig.detach()
        if values.is_cpu and values.numel() and self.min_val.dtype is torch.float32:
            self._observe_and_count(values)
        else:
            super().forward(x_orig)
            self.count(values)
        return x_orig

    def count(self, values: Tensor) -> None:
        """Add ``values`` to the counts."""
        self.seen += values.numel()
        self.saturated += ((values < self.min_val) | (values > self.max_val)).sum()

    def _observe_and_count(self, values: Tensor) -> None:
        low, high = self.min_val, self.max_val
        smallest, largest = (extreme.item() for extreme in torch.aminmax(values.to(low.dtype)))
        if low.item() == math.inf and high.item() == -math.inf:
            low.fill_(smallest)
            high.fill_(largest)
        else:
            low.fill_(self._averaged(low.item(), smallest))
            high.fill_(self._averaged(high.item(), largest))
        _add(self.seen, values.numel())
        if smallest < low.item() or largest > high.item():
            _add(self.saturated, int(torch.count_nonzero(values.clamp(low, high) != values)))

    def _averaged(self, bound: float, extreme: float) -> float:
        """Return the moving average of a bound, as torchao computes it with one-element tensors, but faster.
        Each float32 operation rounds once; in float64, rounded to float32, it gives the same bits."""
        step = c_float(self.averaging_constant).value * c_float(extreme - bound).value
        return bound + c_float(step).value


def _add(counter: Tensor, count: int) -> None:
    # Three times as fast as adding a number to a tensor, and called at every step of a sequence.
    counter.fill_(counter.item() + count)


def saturated_share(module: nn.Module) -> float | None:
    """Return the share of values outside the range at the time ``module``, or an observer in it, saw them."""
    for part in module.modules():
        if isinstance(part, SaturationCountingObserver) and float(part.seen):
            return float(part.saturated / part.seen)
    return None
