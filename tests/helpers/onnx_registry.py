"""torch.onnx reads the Python source of its 500 translations anew at each export, which takes half a second.

Here they are read once a session, and copied.
"""

from __future__ import annotations

import copy
import functools
import importlib
from typing import Any

__all__ = ["registry_made_once"]


@functools.cache
def registry_made_once() -> None:
    """Let exports of this process share what they read."""
    home: Any = importlib.import_module("torch.onnx._internal.exporter._registration")
    read = functools.cache(home.ONNXRegistry.from_torchlib)

    @staticmethod
    def from_torchlib(**settings: Any) -> Any:
        registry = copy.copy(read(**settings))
        registry.functions = {target: [*found] for target, found in registry.functions.items()}
        return registry

    home.ONNXRegistry.from_torchlib = from_torchlib
