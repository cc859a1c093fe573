"""HistogramObserver and MinMaxObserver, faster: calibration spends most of its time in them.

Once a few batches are seen, nearly every further one lies inside the range already known. torchao's
observers, and torch.ao's, compute and copy the unchanged range all the same; these look, and count. State and
qparams are torchao's, bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchao.quantization.pt2e.observer import HistogramObserver, MinMaxObserver

from torchq_compat.specs.two_world_classes import recognised_by_torch_ao

__all__ = ["FastHistogramObserver", "FastMinMaxObserver"]


@recognised_by_torch_ao
class FastHistogramObserver(HistogramObserver):  # type: ignore[misc]
    """torchao's HistogramObserver; values inside the range seen so far are only counted."""

    def forward(self, x_orig: Tensor) -> Tensor:
        values = x_orig.detach()
        low, high = self.min_val, self.max_val
        if values.device == self.histogram.device and _is_inside(values, low, high):
            self.histogram.add_(torch.histc(values, self.bins, min=low.item(), max=high.item()))
            return x_orig
        observed: Tensor = super().forward(x_orig)
        return observed


@recognised_by_torch_ao
class FastMinMaxObserver(MinMaxObserver):  # type: ignore[misc]
    """torchao's MinMaxObserver; values inside the range seen so far change nothing."""

    def forward(self, x_orig: Tensor) -> Tensor:
        if _is_inside(x_orig.detach(), self.min_val, self.max_val):
            return x_orig
        observed: Tensor = super().forward(x_orig)
        return observed


def _is_inside(values: Tensor, low: Tensor, high: Tensor) -> bool:
    """Whether all ``values`` lie in [low, high]. Not with NaN or infinity among them, nor before the first
    batch, when the range is (inf, -inf); nor off the CPU or while compiling, where a look costs more than it
    saves."""
    if not values.is_cpu or not values.numel() or torch.compiler.is_compiling():
        return False
    smallest, largest = torch.aminmax(values)
    return bool(low.item() <= smallest.item() and largest.item() <= high.item())
