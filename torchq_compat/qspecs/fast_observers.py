"""Faster HistogramObserver and MinMaxObserver: calibration spends most of its time in them.

After a few batches, nearly every further batch lies inside the range already known. torchao's observers, and
torch.ao's, compute and copy the unchanged range all the same; these compare and count. Their search for the
best range of a histogram compares one-element tensors, thousands of times; these compare Python numbers.
State and qparams are torchao's, bit for bit.
"""

from __future__ import annotations

import math
import struct
import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Callable

import torch
from torch import Tensor
from torchao.quantization.pt2e.observer import HistogramObserver, MinMaxObserver

from torchq_compat.errors import ExportError
from torchq_compat.qspecs.torch_ao_subclasses import recognised_by_torch_ao

__all__ = ["FastHistogramObserver", "FastMinMaxObserver"]

#: The share of all values by which each step of the search narrows the range.
SEARCH_STEP = 1e-5


@recognised_by_torch_ao
class FastHistogramObserver(HistogramObserver):  # type: ignore[misc]
    """torchao's HistogramObserver; values inside the range seen so far are only counted.

    Attributes:
        left_out_infinity: whether it has seen infinite values, which torchao's observer leaves out with a
            warning that names no place.
    """

    left_out_infinity = False

    def forward(self, x_orig: Tensor) -> Tensor:
        if torch.compiler.is_exporting():
            _refuse_export()
        values = x_orig.detach()
        low, high = self.min_val, self.max_val
        if values.device == self.histogram.device and _is_inside(values, low, high):
            self.histogram.add_(torch.histc(values, self.bins, min=low.item(), max=high.item()))
            return x_orig
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.inf detected", UserWarning)
            observed: Tensor = super().forward(x_orig)
        if not torch.compiler.is_compiling() and bool(values.isinf().any()):
            self.left_out_infinity = True
        return observed

    def _non_linear_param_search(self) -> tuple[Tensor, Tensor]:
        first, last = _least_error_bins(self.histogram, self._compute_quantization_error)
        bin_width = (self.max_val - self.min_val) / self.bins
        return self.min_val + bin_width * first, self.min_val + bin_width * (last + 1)


@recognised_by_torch_ao
class FastMinMaxObserver(MinMaxObserver):  # type: ignore[misc]
    """torchao's MinMaxObserver that ignores values inside the range seen so far."""

    def forward(self, x_orig: Tensor) -> Tensor:
        if _is_inside(x_orig.detach(), self.min_val, self.max_val):
            return x_orig
        observed: Tensor = super().forward(x_orig)
        return observed


# Dynamo runs it as it is, and lets the error out.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _refuse_export() -> None:
    raise ExportError(
        "torch.export: a prepared model cannot be exported: its HistogramObserver asks for values of "
        "tensors.",
        hint="export what convert_fx(prepared) returns.",
    )


def _is_inside(values: Tensor, low: Tensor, high: Tensor) -> bool:
    """Return whether all ``values`` lie in [low, high]. False if NaN or infinity is among them, and before
    the first batch, when the range is (inf, -inf); also off the CPU and while compiling, where the comparison
    costs more than it saves."""
    if not values.is_cpu or not values.numel() or torch.compiler.is_compiling():
        return False
    smallest, largest = torch.aminmax(values)
    return bool(low.item() <= smallest.item() and largest.item() <= high.item())


def _least_error_bins(histogram: Tensor, error: Callable[[int, int], float]) -> tuple[int, int]:
    """Return the first and last bin of the range to quantize. The range is narrowed from the side that loses
    more bins for the same share of the values, until its ``error`` grows."""
    values_up_to, total = histogram.cumsum(0).tolist(), histogram.sum().item()
    first, last, least = 0, len(values_up_to) - 1, math.inf
    low, high = 0.0, 1.0
    while low < high:
        next_low, next_high = low + SEARCH_STEP, high - SEARCH_STEP
        next_first = bisect_left(values_up_to, _float32(next_low * total), first, last)
        next_last = max(first, bisect_right(values_up_to, _float32(next_high * total), first, last + 1) - 1)
        if next_first - first > last - next_last:
            low, candidate = next_low, (next_first, last)
        else:
            high, candidate = next_high, (first, next_last)
        if candidate == (first, last):
            continue
        found = error(*candidate)
        if found > least:
            break
        (first, last), least = candidate, found
    return first, last


def _float32(number: float) -> float:
    """Return ``number`` rounded to float32, as in a comparison with a float32 tensor."""
    rounded: float = struct.unpack("f", struct.pack("f", number))[0]
    return rounded
