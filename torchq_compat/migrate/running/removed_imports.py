"""Restore what torch has removed, for a legacy script: imports find the new modules, and capture functions
exist again."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import nn

from torchq_compat.migrate.legacy_api.removed_captures import REMOVED_CAPTURES, RemovedCapture
from torchq_compat.migrate.legacy_api.removed_modules import REMOVED, new_module

__all__ = ["redirect_removed_imports", "restore_removed_captures"]


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
