"""Qparams that were loaded, not observed: they are valid until the observer sees data again.

A converted model of FX has the qparams but no longer the ranges they were computed from, and no range
reproduces every scale bit for bit. So an observer keeps loaded qparams as two buffers, which take precedence
over the qparams it computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torchao.quantization.pt2e.observer import ObserverBase

from torchq_compat.qspecs.torch_ao_subclasses import recognised_by_torch_ao

__all__ = [
    "LoadedQParamsObserver",
    "adopt_loaded_qparams",
    "has_loaded_qparams",
    "hold_qparams",
    "is_on_loaded_qparams",
    "loaded_qparams",
    "qparams_of",
    "release_qparams",
    "set_loaded_observer",
]

SCALE, ZERO_POINT = "loaded_scale", "loaded_zero_point"
Qparams = tuple[Tensor, Tensor]


def hold_qparams(observer: nn.Module, scale: Tensor, zero_point: Tensor) -> None:
    """Make ``observer`` report ``scale`` and ``zero_point``, one or one for each channel, until it observes
    again. A weight observer keeps them as long as the weight lies on them."""
    release_qparams(observer)
    device = next((buffer.device for buffer in observer.buffers()), scale.device)
    observer.register_buffer(SCALE, scale.detach().to(device, copy=True).reshape(-1))
    observer.register_buffer(ZERO_POINT, zero_point.detach().to(device, copy=True).reshape(-1))
    if not getattr(observer, "observes_at_convert", False):
        observer.register_forward_pre_hook(_observes_again)


def release_qparams(observer: nn.Module) -> None:
    """Make ``observer`` report the qparams it observed."""
    for name in (SCALE, ZERO_POINT):
        observer._buffers.pop(name, None)
    for key in [key for key, hook in observer._forward_pre_hooks.items() if hook is _observes_again]:
        del observer._forward_pre_hooks[key]


def loaded_qparams(observer: nn.Module) -> Qparams | None:
    """Return the qparams loaded into ``observer``, each (n,); None if none were, or it observed since."""
    scale, zero_point = (observer._buffers.get(name) for name in (SCALE, ZERO_POINT))
    return None if scale is None or zero_point is None else (scale, zero_point)


def has_loaded_qparams(observer: nn.Module) -> bool:
    return loaded_qparams(observer) is not None


def qparams_of(observer: nn.Module) -> Qparams:
    """Return scale and zero point of ``observer``: the loaded ones, else those it observed."""
    loaded = loaded_qparams(observer)
    if loaded is not None:
        return loaded
    scale, zero_point = observer.calculate_qparams()  # type: ignore[operator]
    return scale, zero_point


def is_on_loaded_qparams(observer: Any, weight: Tensor) -> bool:
    """Return whether the loaded qparams of ``observer`` represent every value of ``weight`` exactly."""
    loaded = loaded_qparams(observer)
    if loaded is None:
        return False
    axis = int(getattr(observer, "ch_axis", 0))
    shape = [-1 if dimension == axis else 1 for dimension in range(weight.dim())]
    scale, zero_point = (
        each.to(weight.device).reshape(shape if each.numel() > 1 else [1] * weight.dim()) for each in loaded
    )
    integers = torch.round(weight / scale + zero_point)
    return bool(torch.equal((integers - zero_point) * scale, weight))


@recognised_by_torch_ao
class LoadedQParamsObserver(ObserverBase):  # type: ignore[misc]
    """Takes the place of an observer with loaded qparams while torchao converts."""

    def __init__(self, observer: Any) -> None:
        super().__init__(dtype=observer.dtype, is_dynamic=False)
        self.qscheme = observer.qscheme
        self.quant_min, self.quant_max = observer.quant_min, observer.quant_max
        if getattr(observer, "ch_axis", None) is not None:
            self.ch_axis = observer.ch_axis
        self.qparams = qparams_of(observer)

    def forward(self, x: Tensor) -> Tensor:
        return x

    def calculate_qparams(self, **_: Any) -> Qparams:
        return self.qparams


def set_loaded_observer(graph_module: GraphModule, path: str) -> None:
    """Replace the observer at ``path`` by a ``LoadedQParamsObserver``."""
    graph_module.set_submodule(path, LoadedQParamsObserver(graph_module.get_submodule(path)))


def adopt_loaded_qparams(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Give buffers for loaded qparams to the observers of ``model`` that have such qparams in ``state``, and
    remove them from all other observers."""
    for path, module in model.named_modules():
        scale, zero_point = (state.get(f"{path}.{name}") for name in (SCALE, ZERO_POINT))
        if isinstance(scale, Tensor) and isinstance(zero_point, Tensor):
            hold_qparams(module, scale, zero_point)
        elif has_loaded_qparams(module):
            release_qparams(module)


def _observes_again(observer: nn.Module, _args: Any) -> None:
    enabled = getattr(observer, "observer_enabled", None)
    if not isinstance(enabled, Tensor) or bool(enabled.any()):
        release_qparams(observer)
