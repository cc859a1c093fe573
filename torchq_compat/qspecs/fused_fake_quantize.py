"""FusedMovingAvgObsFakeQuantize that converts to the qparams it trained with and counts saturated values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchao.quantization.pt2e.fake_quantize import FusedMovingAvgObsFakeQuantize

from torchq_compat.qspecs.saturation import SaturationCountingObserver
from torchq_compat.qspecs.torch_ao_subclasses import recognised_by_torch_ao
from torchq_compat.support.dtypes import as_dtype

__all__ = ["FusedFakeQuantize"]

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
        scale, zero_point = self.scale.clone(), self.zero_point.clone()
        off, on = torch.zeros_like(self.observer_enabled), torch.ones_like(self.fake_quant_enabled)
        torch.fused_moving_avg_obs_fake_quant(
            self._any_input(),
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

    def _any_input(self) -> Tensor:
        """Return zeros with as many channels as were observed."""
        channels: Tensor = self.activation_post_process.min_val
        if not self.is_per_channel:
            return channels.new_zeros(1)
        return channels.new_zeros((*[1] * self.ch_axis, channels.numel(), 1))
