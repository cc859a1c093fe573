"""FusedMovingAvgObsFakeQuantize, converted to what it trained, with a count of what its range cuts off."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchao.quantization.pt2e.fake_quantize import FusedMovingAvgObsFakeQuantize

from torchq_compat.qspecs.saturation import SaturationCountingObserver
from torchq_compat.qspecs.torch_ao_subclasses import recognised_by_torch_ao
from torchq_compat.support.dtypes import as_dtype

__all__ = ["FusedFakeQuantize"]

#: Of this many calls one is counted: counting all makes training 20 to 45% slower. A prime, so that the steps
#: of a sequence take turns.
COUNTED_EVERY = 31


@recognised_by_torch_ao
class FusedFakeQuantize(FusedMovingAvgObsFakeQuantize):  # type: ignore[misc]
    """One kernel observes, chooses qparams and fake-quantizes; the observer inside holds the range alone."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # A list, because nn.Module makes it slow to set an attribute.
        self.calls = [0]
        self.counts = isinstance(self.activation_post_process, SaturationCountingObserver)

    def forward(self, x: Tensor) -> Tensor:
        # The kernel takes float32 alone.
        fake_quantized: Tensor = as_dtype(super().forward(as_dtype(x, torch.float32)), x.dtype)
        if self.counts:
            self.calls[0] += 1
            if self.calls[0] % COUNTED_EVERY == 0:
                self.activation_post_process.count(x.detach())
        return fake_quantized

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Return the qparams the kernel trains with. Its symmetric scale is ``max(-min / 128, max / 127)``;
        the observer, whose qparams torch.ao and torchao convert with, has ``max(-min, max) / 127.5``. Where
        it observes alone nothing was trained with the kernel's, and those of the observer are returned."""
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
            # A channel of one sign the kernel trains with another zero point, which no backend takes.
            observed_scale, observed_zero_point = observer.calculate_qparams()
            symmetric = zero_point == observed_zero_point
            scale = torch.where(symmetric, scale, observed_scale)
            zero_point = torch.where(symmetric, zero_point, observed_zero_point.to(zero_point.dtype))
        return scale, zero_point

    def _any_input(self) -> Tensor:
        """Zeros with as many channels as were observed."""
        channels: Tensor = self.activation_post_process.min_val
        if not self.is_per_channel:
            return channels.new_zeros(1)
        return channels.new_zeros((*[1] * self.ch_axis, channels.numel(), 1))
