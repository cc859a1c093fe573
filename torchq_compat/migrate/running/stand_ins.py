"""Stand-ins for modules of the FX engine that this torch no longer has, for imports of a legacy script.

A stand-in has the functions that scripts are redirected to, and the configuration classes that FX's module
re-exports; its other names are missing, as in torch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from torchq_compat.migrate.legacy_api.legacy_names import MOVED_FUNCTIONS
from torchq_compat.support import torch_ao

__all__ = ["legacy_module", "put_stand_in"]

#: Modules whose contents are all redirected.
ENGINE = frozenset(moved.legacy for moved in MOVED_FUNCTIONS)
#: The attribute that marks a stand-in.
STANDS_IN = "_torchq_compat_stands_in"


def legacy_module(name: str) -> ModuleType | None:
    """Import a module of torch by name; None if this torch does not have it, or there is only a stand-in."""
    try:
        module = importlib.import_module(name)
    except ImportError:
        return None
    return None if STANDS_IN in vars(module) else module


def put_stand_in(name: str, functions: Mapping[str, Callable[..., Any]]) -> None:
    """Let imports of module ``name`` find ``functions``, if it is a module of the FX engine.

    Args:
        name: dotted name of a module that cannot be imported.
        functions: the functions by their legacy names; they are added to those of an earlier call.
    """
    if name not in ENGINE:
        return
    module = sys.modules.get(name)
    if module is None:
        module = _empty_stand_in(name)
        sys.modules[name] = module
        parent = legacy_module(name.rpartition(".")[0])
        if parent is not None:
            setattr(parent, name.rpartition(".")[2], module)
    vars(module).update(functions)


def _empty_stand_in(name: str) -> ModuleType:
    module = ModuleType(name, f"Stands for {name}, which this torch does not have.")

    def passed_on(attribute: str) -> Any:
        if attribute in torch_ao.__all__:
            return getattr(torch_ao, attribute)
        raise AttributeError(
            f"module {name!r} has no attribute {attribute!r}: torch has removed the module, and "
            "torchq_compat has only what quantizes in its place"
        )

    vars(module).update({"__getattr__": passed_on, STANDS_IN: True})
    return module
