"""Imports of modules that torch has removed, where a legacy script runs: they find the new ones."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from torchq_compat.migrate.legacy_api.removed_modules import REMOVED, new_module

__all__ = ["redirect_removed_imports"]


class _Redirected(MetaPathFinder, Loader):
    """Finds the module that stands in the place of a removed one."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        new = new_module(fullname)
        return None if new is None else ModuleSpec(fullname, self, origin=new, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = new_module(spec.name)
        assert new is not None
        module = importlib.import_module(new)
        # The import system writes the spec of the old name onto it.
        self._own = (module, module.__spec__)
        return module

    def exec_module(self, module: ModuleType) -> None:
        kept, spec = self._own
        if kept is module:
            module.__spec__ = spec


def redirect_removed_imports() -> None:
    """Let imports of removed modules find the new ones, where torch really has removed them."""
    if any(_is_there(name) for name in REMOVED):
        return
    if not any(isinstance(finder, _Redirected) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Redirected())


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
