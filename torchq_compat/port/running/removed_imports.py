"""Restore what torch has removed, for a legacy script: modules, names and the FX engine's own."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import nn

from torchq_compat.port.legacy_api.names import REMOVED, REMOVED_CAPTURES, RemovedCapture, new_module
from torchq_compat.port.source.moved_tables import MOVED_FUNCTIONS
from torchq_compat.support import torch_ao

# Restore what torch has removed, for a legacy script: imports find the new modules, and capture functions
# exist again.


class _Redirected(MetaPathFinder, Loader):
    """A finder that imports the new module in place of a removed one."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        new = new_module(fullname)
        return None if new is None else ModuleSpec(fullname, self, origin=new, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = new_module(spec.name)
        assert new is not None
        module = importlib.import_module(new)
        # The import system overwrites the spec of the new module with that of the old name.
        self._own = (module, module.__spec__)
        return module

    def exec_module(self, module: ModuleType) -> None:
        kept, spec = self._own
        if kept is module:
            module.__spec__ = spec


def redirect_removed_imports() -> None:
    """Let imports of removed modules find the new ones, if torch has removed them."""
    if any(_is_there(name) for name in REMOVED):
        return
    if not any(isinstance(finder, _Redirected) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Redirected())


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def restore_removed_captures() -> None:
    """Give modules that have lost a function of ``REMOVED_CAPTURES`` an equivalent function."""
    for removed in REMOVED_CAPTURES.values():
        module = importlib.import_module(removed.module)
        if not hasattr(module, removed.name):
            setattr(module, removed.name, _capture(removed))


def _capture(removed: RemovedCapture) -> Callable[..., Any]:
    def capture(
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        dynamic_shapes: Any = None,
        **settings: Any,
    ) -> Any:
        if removed.gave_module:
            # The removed function traced with Dynamo; Quantizers need the source functions it records.
            settings.setdefault("strict", True)
        program = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes, **settings)
        return program.module() if removed.gave_module else program

    capture.__name__ = removed.name
    capture.__module__ = removed.module
    return capture


# Stand-ins for modules of the FX engine that this torch no longer has, for imports of a legacy script.
#
# A stand-in has the functions that scripts are redirected to, and the configuration classes that FX's module
# re-exports; its other names are missing, as in torch.


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
