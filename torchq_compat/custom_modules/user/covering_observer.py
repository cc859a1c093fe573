"""One output observer for a module that is called several times, whose qparams cover all calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchq_compat.qspecs.qparams import PerTensorQParams, covering

__all__ = ["observer_of_all_calls"]


class CoveringObserver(nn.Module):
    """Per-tensor qparams whose range contains the ranges of several observers of one dtype."""

    def __init__(self, observers: Sequence[nn.Module]) -> None:
        super().__init__()
        first: Any = observers[0]
        self.dtype: torch.dtype = first.dtype
        self.qscheme: torch.qscheme = first.qscheme
        self.quant_min: int = first.quant_min
        self.quant_max: int = first.quant_max
        self.observers = nn.ModuleList(observers)

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Return scale (1,) float32 and zero point (1,) int64."""
        qparams = covering([self._qparams(observer) for observer in self.observers])
        return torch.tensor([qparams.scale]), torch.tensor([qparams.zero_point])

    def _qparams(self, observer: Any) -> PerTensorQParams:
        scale, zero_point = observer.calculate_qparams()
        return PerTensorQParams(float(scale), int(zero_point), self.quant_min, self.quant_max, self.dtype)


def observer_of_all_calls(observers: Sequence[nn.Module]) -> nn.Module:
    """Return one observer that covers ``observers``, one for each call."""
    return observers[0] if len(observers) == 1 else CoveringObserver(observers)
