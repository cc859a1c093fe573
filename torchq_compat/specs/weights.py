"""Weight observers look at the weight once, at convert, as FX's do.

torchao puts the weight observer into the graph, where it would run on the same unchanged weight in every
calibration call and, in a recurrent cell, in every time step.
"""

from __future__ import annotations

from typing import Any

import torchao.quantization.pt2e.observer as pt2e_observer
from torch import Tensor, nn

from torchq_compat.specs.observer_settings import ObserverSettings
from torchq_compat.specs.observers import ObserverConstructor
from torchq_compat.specs.two_world_classes import recognised_by_torch_ao

__all__ = ["WeightConstructor", "WeightObserver"]


@recognised_by_torch_ao
class WeightObserver(pt2e_observer.ObserverBase):  # type: ignore[misc]
    """Lets the weight pass in calibration; ``observe`` looks at it."""

    def __init__(self, constructor: ObserverConstructor) -> None:
        settings = constructor.settings
        super().__init__(dtype=settings.dtype, is_dynamic=settings.is_dynamic)
        self.constructor = constructor
        self.observer = constructor()
        self.qscheme = settings.qscheme
        self.quant_min = settings.quant_min
        self.quant_max = settings.quant_max
        if settings.ch_axis is not None:
            self.ch_axis = settings.ch_axis

    def forward(self, weight: Tensor) -> Tensor:
        return weight

    def observe(self, weight: Tensor) -> None:
        """Forget what was seen before and look at ``weight`` as it is now."""
        self.observer = self.constructor().to(weight.device)
        self.observer(weight.detach())

    def observe_attribute(self, root: nn.Module, path: str) -> None:
        """``observe`` the weight at ``path`` in ``root``."""
        self.observe(_attribute(root, path))

    def calculate_qparams(self, **_: Any) -> tuple[Tensor, Tensor]:
        scale, zero_point = self.observer.calculate_qparams()  # type: ignore[operator]
        return scale, zero_point


def _attribute(root: nn.Module, path: str) -> Tensor:
    parent, _, name = path.rpartition(".")
    value = getattr(root.get_submodule(parent), name)
    assert isinstance(value, Tensor)
    return value


class WeightConstructor:
    """An ``ObserverConstructor`` whose observers wait for convert."""

    def __init__(self, constructor: ObserverConstructor) -> None:
        self.constructor = constructor
        self.settings: ObserverSettings = constructor.settings
        self.__name__ = constructor.__name__

    def with_args(self, **_spec: Any) -> WeightConstructor:
        return self

    def __call__(self) -> nn.Module:
        return WeightObserver(self.constructor)
