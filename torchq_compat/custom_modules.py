"""Custom modules: float module -> observed module -> quantized module, each one opaque call of the outer
graph.

Each kind of custom module has a handler in ``registry``; the stages loop over the handlers and name no class.
Scripts add a kind with ``register``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchq_compat.modules.registry import CustomModuleHandler, register
    from torchq_compat.modules.user_modules import UserModuleHandler

__all__ = ["CustomModuleHandler", "UserModuleHandler", "register"]


#: Imported on first use: the modules of this package import each other through it.
_HOMES = {
    "CustomModuleHandler": "modules.registry",
    "UserModuleHandler": "modules.user_modules",
    "register": "modules.registry",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"torchq_compat.{_HOMES[name]}"), name)
