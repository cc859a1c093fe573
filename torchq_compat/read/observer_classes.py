"""The observers of this package: torchao's, faster, or with what FX's do and torchao's do not."""

import functools
import math
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from ctypes import c_float
from itertools import accumulate, chain, islice, repeat
from operator import neg, sub
from typing import Any

import torch
from torch import Tensor, nn
from torchao.quantization.pt2e import observer as observers
from torchao.quantization.pt2e.fake_quantize import FakeQuantizeBase, FusedMovingAvgObsFakeQuantize

from torchq_compat.errors import ExportError
from torchq_compat.read.qparams import Qparams, has_loaded_qparams
from torchq_compat.read.torch_ao_classes import PER_CHANNEL, recognised_by_torch_ao
from torchq_compat.support.dtypes import SIXTEEN_BITS, as_dtype, dtype_range, is_integer, plain_dtype
from torchq_compat.support.process_state import is_compiling, is_exporting

# Faster HistogramObserver and MinMaxObserver: calibration spends most of its time in them.
#
# After a few batches, nearly every further batch lies inside the range already known. torchao's observers,
# and torch.ao's, compute and copy the unchanged range all the same; these compare and count. State and
# qparams are torchao's, bit for bit.


@recognised_by_torch_ao
class FastHistogramObserver(observers.HistogramObserver):  # type: ignore[misc]
    """torchao's HistogramObserver; values inside the range seen so far are only counted.

    Attributes:
        left_out_infinity: whether it has seen infinite values, which torchao's observer leaves out with a
            warning that names no place.
    """

    left_out_infinity = False

    def forward(self, x_orig: Tensor) -> Tensor:
        if is_exporting():
            _refuse_export()
        values = x_orig.detach()
        if not values.is_cpu and values.dtype in (torch.bfloat16, torch.float16):
            values = values.float()  # CUDA has no torch.histc of halves.
        low, high = self.min_val, self.max_val
        if values.device == self.histogram.device and _is_inside(values, low, high):
            self.histogram.add_(torch.histc(values, self.bins, min=low.item(), max=high.item()))
            return x_orig
        if not is_compiling() and bool(values.isinf().any()):
            self.left_out_infinity = True
            values = values[values.isfinite() | values.isnan()]
        super().forward(values)
        return x_orig

    def _upscale_histogram(self, histogram: Tensor, *ends: Tensor) -> Tensor:
        """Return ``histogram`` in the bins of a wider range, with torchao's bits: bins without values, most
        of them after few batches, would add zeros."""
        orig_min, orig_max, update_min, update_max = ends
        filled, rate = histogram.nonzero().squeeze(1), self.upsample_rate
        parts = self.bins * rate
        starts = torch.linspace(orig_min, orig_max, parts + 1, device=orig_min.device)[:-1]
        middles = starts.to(histogram.device) + 0.5 * ((orig_max - orig_min) / parts)
        edges = torch.linspace(update_min, update_max, self.bins + 1, device=update_min.device)
        middles = middles.reshape(self.bins, rate)[filled].flatten()
        bins = torch.bucketize(middles, edges.to(histogram.device), right=True) - 1
        weights = histogram[filled].repeat_interleave(rate) / rate
        return torch.bincount(bins.clamp(0, self.bins - 1), weights=weights, minlength=self.bins)

    def _non_linear_param_search(self) -> tuple[Tensor, Tensor]:
        first, last = least_error_bins(self)
        bin_width = (self.max_val - self.min_val) / self.bins
        return self.min_val + bin_width * first, self.min_val + bin_width * (last + 1)


@recognised_by_torch_ao
class FastMinMaxObserver(observers.MinMaxObserver):  # type: ignore[misc]
    """torchao's MinMaxObserver that ignores values inside the range seen so far."""

    def forward(self, x_orig: Tensor) -> Tensor:
        if _is_inside(x_orig.detach(), self.min_val, self.max_val):
            return x_orig
        observed: Tensor = super().forward(x_orig)
        return observed


# Dynamo runs it as it is, and lets the error out.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _refuse_export() -> None:
    raise ExportError.of("TQ930.histogram")


def _is_inside(values: Tensor, low: Tensor, high: Tensor) -> bool:
    """Return whether all ``values`` lie in [low, high]. False if NaN or infinity is among them, and before
    the first batch, when the range is (inf, -inf); also off the CPU and while compiling, where the comparison
    costs more than it saves."""
    if not values.is_cpu or not values.numel() or is_compiling():
        return False
    smallest, largest = torch.aminmax(values)
    return bool(low.item() <= smallest.item() and largest.item() <= high.item())


# Moving-average observers that count the values outside their range.
#
# Over the steps of a sequence, a moving average converges to the mean range of a step, which is narrower
# than the range of all values. The qparams are torchao's, bit for bit; the count shows the loss in
# ``explain``.


@recognised_by_torch_ao
class SaturationCountingObserver(observers.MovingAverageMinMaxObserver):  # type: ignore[misc]
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
        else:
            super().forward(x_orig)
            self.count(values)
        return x_orig

    def count(self, values: Tensor) -> None:
        """Add ``values`` to the counts."""
        self.seen += values.numel()
        self.saturated += ((values < self.min_val) | (values > self.max_val)).sum()

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


# FusedMovingAvgObsFakeQuantize that converts to the qparams it trained with and counts saturated values.


#: One call in this many is counted: counting every call slows training by 20 to 45%. A prime, so that all
#: steps of a sequence get their turn.
COUNTED_EVERY = 31


@recognised_by_torch_ao
class FusedFakeQuantize(FusedMovingAvgObsFakeQuantize):  # type: ignore[misc]
    """One kernel observes, chooses qparams and fake-quantizes; the inner observer only holds the range."""

    #: Whether it converts with the qparams of its observer, as torch.ao's and torchao's do.
    converts_as_observed = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # A list, because setting an attribute of an nn.Module is slow.
        self.calls = [0]
        self.counts = isinstance(self.activation_post_process, SaturationCountingObserver)

    def forward(self, x: Tensor) -> Tensor:
        # The kernel supports only float32.
        fake_quantized: Tensor = as_dtype(super().forward(as_dtype(x, torch.float32)), x.dtype)
        if self.counts:
            self.calls[0] += 1
            if self.calls[0] % COUNTED_EVERY == 0:
                self.activation_post_process.count(x.detach())
        return fake_quantized

    def observe(self, weight: Tensor, factor: Tensor | None = None) -> None:
        """Observe ``weight * factor`` as a call would, which observes only its extremes."""
        axis = self.ch_axis if self.is_per_channel else None
        sizes = weight.dim() * (1,) if factor is None else factor.shape
        others = [index for index, size in enumerate(sizes) if index != axis and size == 1]
        bounds = (torch.amin, torch.amax) if others else ()
        extremes = [bound(weight, others, keepdim=True) for bound in bounds] or [weight]
        values = torch.cat(extremes, *others[:1])
        self(values if factor is None else values * factor)

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Return the qparams that it trains with, or those of its observer if it ``converts_as_observed``."""
        if self.converts_as_observed:
            observed: tuple[Tensor, Tensor] = self.activation_post_process.calculate_qparams()
            return observed
        return self.trained_qparams()

    def trained_qparams(self) -> tuple[Tensor, Tensor]:
        """Return the qparams that the kernel trains with. Its symmetric scale is
        ``max(-min / 128, max / 127)``; the scale of the observer, with which torch.ao and torchao convert, is
        ``max(-min, max) / 127.5``. While only observing, nothing is trained with the kernel's qparams, and
        the observer's are returned."""
        observer = self.activation_post_process
        has_seen = observer.min_val.numel() > 0 and not bool((observer.min_val > observer.max_val).any())
        if not has_seen or not bool(self.fake_quant_enabled):
            qparams: tuple[Tensor, Tensor] = observer.calculate_qparams()
            return qparams
        channels: Tensor = observer.min_val  # Any input of as many channels as were observed will do.
        shape = (*[1] * self.ch_axis, channels.numel(), 1) if self.is_per_channel else (1,)
        scale, zero_point = self.scale.clone(), self.zero_point.clone()
        off, on = torch.zeros_like(self.observer_enabled), torch.ones_like(self.fake_quant_enabled)
        torch.fused_moving_avg_obs_fake_quant(
            channels.new_zeros(shape),
            off,
            on,
            observer.min_val.clone(),
            observer.max_val.clone(),
            scale,
            zero_point,
            observer.averaging_constant,
            observer.quant_min,
            observer.quant_max,
            self.ch_axis,
            self.is_per_channel,
            self.is_symmetric_quant,
        )
        if self.is_symmetric_quant:
            # For a channel of one sign the kernel uses a nonzero zero point, which no backend supports.
            observed_scale, observed_zero_point = observer.calculate_qparams()
            symmetric = zero_point == observed_zero_point
            scale = torch.where(symmetric, scale, observed_scale)
            zero_point = torch.where(symmetric, zero_point, observed_zero_point.to(zero_point.dtype))
        return scale, zero_point


# A min-max observer whose scale is a power of two, which fixed-point kernels require.


@recognised_by_torch_ao
class PowerOfTwoMinMaxObserver(observers.MinMaxObserver):  # type: ignore[misc]
    """A symmetric observer: zero point 0, scale the smallest power of two at which no seen value saturates.

    Args:
        dtype: a signed integer dtype.
        kwargs: as for torchao's MinMaxObserver, except ``qscheme``.
    """

    def __init__(self, dtype: torch.dtype = torch.int16, **kwargs: Any) -> None:
        kwargs.pop("qscheme", None)
        super().__init__(dtype=dtype, qscheme=torch.per_tensor_symmetric, **kwargs)

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Return ``scale`` (1,) float32, a power of two, and ``zero_point`` (1,) int64, zero."""
        largest = torch.maximum(-self.min_val / -self.quant_min, self.max_val / self.quant_max)
        smallest = torch.finfo(torch.float32).eps
        scale = torch.exp2(torch.ceil(torch.log2(largest.clamp_min(smallest))))
        unseen = not bool(torch.isfinite(scale).all())
        scale = torch.ones_like(scale) if unseen else scale
        return scale.reshape(1), torch.zeros(1, dtype=torch.int64, device=scale.device)


# How precisely qparams represent most of the values that a histogram has seen.


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


# FX's qparams of a trained model: those of each fake-quantize's observer, over the whole range of the dtype.
#
# Legacy: ``convert_fx`` of torch.ao asks the observer in a fake-quantize, whose symmetric scale is not that
# of the fused kernel, and quantizes to all integers of the dtype, also where training clamped to fewer.


def converts_otherwise(module: nn.Module, *, is_trained: bool) -> bool:
    """Return whether FX converts ``module`` to other qparams than it fake-quantizes with, or, if it
    ``is_trained``, to another range."""
    if not _has_a_choice(module):
        return False
    source: Any = getattr(module, "activation_post_process", module)
    whole = dtype_range(plain_dtype(module.dtype))  # type: ignore[arg-type]
    if is_trained and (source.quant_min, source.quant_max) != whole:
        return True
    if not isinstance(module, FusedFakeQuantize) or has_loaded_qparams(module):
        return False
    pairs = zip(module.trained_qparams(), source.calculate_qparams(), strict=True)
    return not all(torch.equal(trained.to(observed.dtype), observed) for trained, observed in pairs)


def use_observer_qparams(module: nn.Module) -> None:
    """Let ``module``, if it is a fake-quantize, convert with its observer's qparams, channels to the whole
    range of the dtype. The range of qparams per tensor is chosen where they are frozen."""
    if not _has_a_choice(module):
        return
    if isinstance(module, FusedFakeQuantize):
        module.converts_as_observed = True
    if module.qscheme in PER_CHANNEL:
        low, high = dtype_range(plain_dtype(module.dtype))  # type: ignore[arg-type]
        module.quant_min, module.quant_max = low, high  # type: ignore[assignment]


def _has_a_choice(module: nn.Module) -> bool:
    """Return whether ``module`` is a static fake-quantize to integers that FX has, without fixed qparams and
    without a conversion of its own."""
    if not isinstance(module, FakeQuantizeBase) or getattr(module, "is_dynamic", False):
        return False
    if hasattr(module, "convert"):
        return False
    if isinstance(getattr(module, "activation_post_process", None), observers.FixedQParamsObserver):
        return False
    dtype = plain_dtype(module.dtype)
    return is_integer(dtype) and dtype not in SIXTEEN_BITS


# Which bins of a histogram to quantize: torchao's search, with its results, in few calls of torch.
#
# torchao compares one-element tensors up to 100,000 times, and measures the error of one range after the
# other. Which ranges it tries does not depend on their errors, which only end the search: so they are listed
# with Python's numbers, and measured together.


#: The share of all values by which each step of the search narrows the range.
SEARCH_STEP = 1e-5

Bins = tuple[int, int]


def searched_qparams(observer: Any) -> Qparams:
    """Return the qparams of a HistogramObserver of torch.ao, bit for bit, in a part of its time."""
    low, high = FastHistogramObserver._non_linear_param_search(observer)
    scale, zero_point = observer._calculate_qparams(low, high)
    return scale, zero_point


def least_error_bins(observer: observers.HistogramObserver) -> Bins:
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


def _errors(observer: observers.HistogramObserver, ranges: Sequence[Bins]) -> list[float]:
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
