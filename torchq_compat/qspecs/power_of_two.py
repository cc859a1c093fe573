"""A min-max observer whose scale is a power of two, which fixed-point kernels require."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchao.quantization.pt2e.observer import MinMaxObserver

from torchq_compat.qspecs.torch_ao_subclasses import recognised_by_torch_ao

__all__ = ["PowerOfTwoMinMaxObserver"]


@recognised_by_torch_ao
class PowerOfTwoMinMaxObserver(MinMaxObserver):  # type: ignore[misc]
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
