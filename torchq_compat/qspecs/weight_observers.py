"""Weight observers that observe the weight once, at convert, as FX's do.

torchao puts the weight observer into the graph, where it would run on the same unchanged weight in every
calibration call and, in a recurrent cell, in every time step.
"""

from __future__ import annotations

from typing import Any

import torch
import torchao.quantization.pt2e.observer as pt2e_observer
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from torchq_compat.errors import ConfigError
from torchq_compat.qspecs.float_qparams import fold_weight
from torchq_compat.qspecs.loaded_qparams import is_on_loaded_qparams, loaded_qparams, release_qparams
from torchq_compat.qspecs.observer_settings import ObserverSettings
from torchq_compat.qspecs.observers import ObserverConstructor
from torchq_compat.qspecs.torch_ao_subclasses import recognised_by_torch_ao
from torchq_compat.support.graph_nodes import attribute_at

__all__ = ["WeightConstructor", "WeightObserver"]


@recognised_by_torch_ao
class WeightObserver(pt2e_observer.ObserverBase):  # type: ignore[misc]
    """Passes the weight through in calibration; ``observe`` observes it."""

    #: Whether its calls in calibration leave its qparams unchanged.
    observes_at_convert = True

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
        """Discard earlier observations and observe ``weight`` as it is now."""
        if not is_on_loaded_qparams(self, weight.detach()):
            release_qparams(self)
        self.observer = self.constructor().to(weight.device)
        self.observer(weight.detach())

    def observe_attribute(self, root: nn.Module, path: str) -> None:
        """``observe`` the weight at ``path`` in ``root``.

        Raises:
            ConfigError: the observer fails on the weight.
        """
        try:
            self.observe(attribute_at(root, path))
        except Exception as cause:  # The observer may be a user's own.
            raise ConfigError(
                f"the weight observer of {path!r} cannot take it: {type(cause).__name__}: {cause}",
                hint="its ch_axis has to be a dimension of the weight, and its dtype and range have to fit; "
                "call the observer once on the weight and see.",
            ) from cause

    def calculate_qparams(self, **_: Any) -> tuple[Tensor, Tensor]:
        loaded = loaded_qparams(self)
        if loaded is not None:
            return loaded
        scale, zero_point = self.observer.calculate_qparams()  # type: ignore[operator]
        return scale, zero_point


class FloatQParamsWeightObserver(WeightObserver):
    """The weight observer of embeddings, whose zero points are floats."""

    def convert(self, model: GraphModule, observer_node: Node) -> None:
        """Replace ``observer_node`` by the dequantize of a folded integer weight; torchao calls this."""
        source = observer_node.args[0]
        assert isinstance(source, Node)
        self.observe_attribute(model, str(source.target))
        scale, zero_point = self.calculate_qparams()
        fold_weight(model, observer_node, scale, zero_point, self)


class WeightConstructor:
    """An ``ObserverConstructor`` whose observers observe at this package's convert."""

    def __init__(self, constructor: ObserverConstructor) -> None:
        self.constructor = constructor
        self.setting = constructor.setting
        self.settings: ObserverSettings = constructor.settings
        self.__name__ = constructor.__name__

    def with_args(self, **_spec: Any) -> WeightConstructor:
        return self

    @property
    def for_any_convert(self) -> ObserverConstructor | WeightConstructor:
        """A constructor for torchao's own convert too: it needs observers that have observed, except for
        float zero points, whose observers have a ``convert``."""
        return self if self._has_float_zero_points else self.constructor

    @property
    def _has_float_zero_points(self) -> bool:
        return self.settings.qscheme is torch.per_channel_affine_float_qparams

    def __call__(self) -> nn.Module:
        if self._has_float_zero_points:
            return FloatQParamsWeightObserver(self.constructor)
        return WeightObserver(self.constructor)
