"""Which bins of a histogram to quantize: torchao's search, with its results, in few calls of torch.

torchao compares one-element tensors up to 100,000 times, and measures the error of one range after the
other. Which ranges it tries does not depend on their errors, which only end the search: so they are listed
with Python's numbers, and measured together.
"""

from __future__ import annotations

import functools
import math
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, islice, repeat
from operator import neg, sub

import torch
from torch import Tensor
from torchao.quantization.pt2e.observer import HistogramObserver

#: The share of all values by which each step of the search narrows the range.
SEARCH_STEP = 1e-5

Bins = tuple[int, int]


def least_error_bins(observer: HistogramObserver) -> Bins:
    """Return the first and last bin of the range to quantize: ever narrower ranges, until the error grows."""
    ranges = _narrowed_ranges(observer.histogram)
    best, least = (0, observer.bins - 1), math.inf
    for count in chain((2, 4), repeat(8)):  # Most searches are short.
        candidates = list(islice(ranges, count))
        if not candidates:
            break
        for candidate, error in zip(candidates, _errors(observer, candidates), strict=True):
            if error > least:
                return best
            best, least = candidate, error
    return best


def _narrowed_ranges(histogram: Tensor) -> Iterator[Bins]:
    """Yield the ranges the search tries. Each step leaves out ``SEARCH_STEP`` of the values, on the side that
    loses more bins with them. Once a step on the left loses no bin, all further ones are on the right, and
    those that lose none are skipped."""
    values_up_to, total, highs = histogram.cumsum(0).tolist(), histogram.sum().item(), _highs()

    def last_at(step: int) -> int:
        return max(first, bisect_right(values_up_to, _float32(highs[step] * total), first, last + 1) - 1)

    first, last, low, step = 0, len(values_up_to) - 1, 0.0, 0
    while low < highs[step]:
        next_low = low + SEARCH_STEP
        next_first = bisect_left(values_up_to, _float32(next_low * total), first, last)
        if next_first == first:
            break
        next_last = last_at(step + 1)
        if next_first - first > last - next_last:
            low, first = next_low, next_first
        else:
            step, last = step + 1, next_last
        yield first, last
    end = bisect_left(highs, -low, key=neg)
    while first < last:
        step = bisect_right(
            highs, -values_up_to[last], step + 1, max(step, end) + 1, key=lambda high: -_float32(high * total)
        )
        if step > end:
            break
        last = last_at(step)
        yield first, last


@functools.cache
def _highs() -> list[float]:
    """Return the share of the values up to the upper end of the range, step by step on the right, as a loop
    rounds it."""
    return list(accumulate(repeat(SEARCH_STEP, round(1 / SEARCH_STEP) + 2), sub, initial=1.0))


def _errors(observer: HistogramObserver, ranges: Sequence[Bins]) -> list[float]:
    """Return the squared error that each of the ``ranges`` would have, with the roundings of torchao's
    ``_compute_quantization_error``: the integral over each bin of the square of the distance to the middle of
    the level that a value falls into."""
    histogram = observer.histogram
    if not histogram.is_cpu or histogram.dtype is not torch.float32:
        return [observer._compute_quantization_error(*bins) for bins in ranges]
    width, levels = (observer.max_val.item() - observer.min_val.item()) / observer.bins, observer.dst_nbins
    steps = [width * (last - first + 1) / levels for first, last in ranges]
    step = torch.tensor(steps, dtype=torch.float32).unsqueeze(1)
    begin = (torch.arange(observer.bins) - torch.tensor(ranges)[:, :1]) * width
    end = begin + width
    # As by a floored division of float32, in half the time: two doubles of so few bits have no quotient that
    # rounds up to an integer.
    level_of_begin, level_of_end = (
        (side.double() / step.double()).floor_().clamp_(0, levels - 1).float() for side in (begin, end)
    )
    half, density = step / 2, histogram / width
    cube = half * half * half
    begin -= (level_of_begin + 0.5).mul_(step)
    end -= (level_of_end * step).add_(half)
    error = (cube - begin * begin * begin).div_(3).mul_(density)
    error += level_of_end.sub_(level_of_begin).sub_(1).mul_(((cube + cube) / 3) * density)
    error += (end * end * end).add_(cube).div_(3).mul_(density)
    return [sum_ if size else 0.0 for sum_, size in zip(error.sum(1).tolist(), steps, strict=True)]


def _float32(number: float) -> float:
    """Return ``number`` rounded to float32, as in a comparison with a float32 tensor."""
    rounded: float = struct.unpack("f", struct.pack("f", number))[0]
    return rounded
