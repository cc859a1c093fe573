"""Moving-average observers that count what their range cuts off.

Over the steps of a sequence a moving average settles on the mean range of a step, which is narrower than the
range of the values. The qparams are torchao's, bit for bit; the count makes the loss visible in ``explain``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchao.quantization.pt2e.observer import MovingAverageMinMaxObserver

from torchq_compat.specs.two_world_classes import recognised_by_torch_ao

__all__ = ["SaturationCountingObserver", "saturated_share"]


@recognised_by_torch_ao
class SaturationCountingObserver(MovingAverageMinMaxObserver):  # type: ignore[misc]
    """torchao's MovingAverageMinMaxObserver, with a count of values outside its range as they pass.

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
        if values.is_cpu and values.numel():
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
        """torchao's arithmetic, in place, and the count, in the time that torchao takes alone."""
        low, high = self.min_val, self.max_val
        smallest, largest = torch.aminmax(values.to(low.dtype))
        if low.item() == float("inf") and high.item() == float("-inf"):
            low.copy_(smallest)
            high.copy_(largest)
        else:
            low.add_((smallest - low).mul_(self.averaging_constant))
            high.add_((largest - high).mul_(self.averaging_constant))
        _add(self.seen, values.numel())
        if smallest.item() < low.item() or largest.item() > high.item():
            _add(self.saturated, int(torch.count_nonzero(values.clamp(low, high) != values)))


def _add(counter: Tensor, count: int) -> None:
    # Three times as fast as adding a number to a tensor; it happens at every step of a sequence.
    counter.fill_(counter.item() + count)


def saturated_share(module: nn.Module) -> float | None:
    """Share of the values seen by ``module``, or an observer inside, that lay outside its range then."""
    for part in module.modules():
        if isinstance(part, SaturationCountingObserver) and float(part.seen):
            return float(part.saturated / part.seen)
    return None
