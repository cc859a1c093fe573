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
        if x_orig.numel():
            self._observe(x_orig.detach())
        return x_orig

    def _observe(self, values: Tensor) -> None:
        low, high = self.min_val, self.max_val
        smallest, largest = torch.aminmax(values.to(low.dtype))
        if low.item() == float("inf") and high.item() == float("-inf"):
            low.copy_(smallest)
            high.copy_(largest)
        else:
            # torchao's arithmetic, in place, which takes half the time.
            low.add_((smallest - low).mul_(self.averaging_constant))
            high.add_((largest - high).mul_(self.averaging_constant))
        self._count(values, smallest, largest)

    def count(self, values: Tensor) -> None:
        """Add ``values`` to the counts."""
        if values.numel():
            self._count(values, *torch.aminmax(values))

    def _count(self, values: Tensor, smallest: Tensor, largest: Tensor) -> None:
        low, high = self.min_val, self.max_val
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
