"""A parent for a model that is itself a custom module, so that the graph has a submodule to call.

In the prepared and converted model the path of the custom module is ``module``; its submodules are also
reachable without that name, for example at ``layers.0.layer_fw.cell``.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import nn

from torchq_compat.config.custom_configs import PrepareSettings
from torchq_compat.custom_modules.registry import handlers
from torchq_compat.graph.graph_module import ROOT

__all__ = ["with_parent"]


class _Parent(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.add_module(ROOT, model)
        self.training = model.training

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):
                raise  # The parent must not be copied with the __deepcopy__ of a parametrized model.
            return getattr(super().__getattr__(ROOT), name)


def with_parent(model: nn.Module, settings: PrepareSettings) -> nn.Module:
    """Return ``model``; if it is a custom module, a parent of it with the same class name and signature."""
    if not _is_custom_module(model, settings):
        return model

    @functools.wraps(type(model).forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.get_submodule(ROOT)(*args, **kwargs)

    forward.__signature__ = inspect.signature(type(model).forward)  # type: ignore[attr-defined]
    parent: nn.Module = type(type(model).__name__, (_Parent,), {"forward": forward})(model)
    return parent


def _is_custom_module(model: nn.Module, settings: PrepareSettings) -> bool:
    if any(type(model) in classes for classes in settings.float_to_observed.values()):
        return True
    return any(handler.is_opaque(model) or handler.mapping_hint(model) is not None for handler in handlers())
