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
        x: Tensor = super().forward(x_orig)
        self.count(x_orig.detach())
        return x

    def count(self, values: Tensor) -> None:
        """Add ``values`` to the counts."""
        self.seen += values.numel()
        self.saturated += ((values < self.min_val) | (values > self.max_val)).sum()


def saturated_share(module: nn.Module) -> float | None:
    """Share of the values seen by ``module``, or an observer inside, that lay outside its range then."""
    for part in module.modules():
        if isinstance(part, SaturationCountingObserver) and float(part.seen):
            return float(part.saturated / part.seen)
    return None
