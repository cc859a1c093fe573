"""Qparams that were loaded, not observed: they hold until the observer sees data again.

A converted model of FX has the qparams and no longer the ranges they came from, and no range gives back every
scale bit for bit. So an observer carries what was loaded as two buffers, which come before what it computes.
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
    """Let ``observer`` answer with ``scale`` and ``zero_point``, one or one for each channel, until it
    observes again. An observer of a weight keeps them as long as the weight lies on them."""
    release_qparams(observer)
    device = next((buffer.device for buffer in observer.buffers()), scale.device)
    observer.register_buffer(SCALE, scale.detach().to(device, copy=True).reshape(-1))
    observer.register_buffer(ZERO_POINT, zero_point.detach().to(device, copy=True).reshape(-1))
    if not getattr(observer, "observes_at_convert", False):
        observer.register_forward_pre_hook(_observes_again)


def release_qparams(observer: nn.Module) -> None:
    """Let ``observer`` answer with what it observed."""
    for name in (SCALE, ZERO_POINT):
        observer._buffers.pop(name, None)
    for key in [key for key, hook in observer._forward_pre_hooks.items() if hook is _observes_again]:
        del observer._forward_pre_hooks[key]


def loaded_qparams(observer: nn.Module) -> Qparams | None:
    """What was loaded into ``observer``, each of shape (n,); None if nothing was, or it observed since."""
    scale, zero_point = (observer._buffers.get(name) for name in (SCALE, ZERO_POINT))
    return None if scale is None or zero_point is None else (scale, zero_point)


def has_loaded_qparams(observer: nn.Module) -> bool:
    return loaded_qparams(observer) is not None


def qparams_of(observer: nn.Module) -> Qparams:
    """Scale and zero point of ``observer``: those that were loaded, else those of what it observed."""
    loaded = loaded_qparams(observer)
    if loaded is not None:
        return loaded
    scale, zero_point = observer.calculate_qparams()  # type: ignore[operator]
    return scale, zero_point


def is_on_loaded_qparams(observer: Any, weight: Tensor) -> bool:
    """Whether every value of ``weight`` is an integer of the loaded qparams of ``observer``, dequantized."""
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
    """Stands for an observer with loaded qparams while torchao converts."""

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
    """Put a ``LoadedQParamsObserver`` in the place of the observer at ``path``."""
    graph_module.set_submodule(path, LoadedQParamsObserver(graph_module.get_submodule(path)))


def adopt_loaded_qparams(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Let the observers of ``model`` that have loaded qparams in ``state``, and no others, have a place for
    them."""
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
