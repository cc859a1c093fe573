"""Restore what torch has removed, for a legacy script: modules, names and the FX engine's own."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchq_compat.port.legacy_api import names
from torchq_compat.port.source.moved_tables import MOVED_FUNCTIONS
from torchq_compat.support import torch_ao

# Restore what torch has removed, for a legacy script: imports find the new modules, and capture functions
# exist again.


class _Redirected(MetaPathFinder, Loader):
    """A finder that imports the new module in place of a removed one."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        new = names.new_module(fullname)
        return None if new is None else ModuleSpec(fullname, self, origin=new, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = names.new_module(spec.name)
        assert new is not None
        module = importlib.import_module(new)
        vars(module).setdefault("__getattr__", partial(_elsewhere, new))
        # The import system overwrites the spec of the new module with that of the old name.
        self._own = (module, module.__spec__)
        return module

    def exec_module(self, module: ModuleType) -> None:
        kept, spec = self._own
        if kept is module:
            module.__spec__ = spec


def _elsewhere(module: str, name: str) -> Any:
    """Return what ``module`` had by ``name`` in its time in torch, from where it is now."""
    if name not in names.NAMES_ELSEWHERE:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    home, now = names.NAMES_ELSEWHERE[name]
    return getattr(importlib.import_module(home), now)


def redirect_removed_imports() -> None:
    """Let imports of removed modules find the new ones, if torch has removed them."""
    if any(_is_there(name) for name in names.REMOVED):
        return
    if not any(isinstance(finder, _Redirected) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Redirected())


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def restore_removed_captures() -> None:
    """Give modules that have lost one of PT2E's first functions an equivalent one; ``torch._dynamo.export``
    captures what PT2E takes today where it is asked for aten."""
    for removed in names.REMOVED_CAPTURES.values():
        module = importlib.import_module(removed.module)
        if not hasattr(module, removed.name):
            setattr(module, removed.name, _capture(removed))
        if not hasattr(module, "dynamic_dim"):
            module.dynamic_dim = _FreeSize  # type: ignore[attr-defined]
    for moved in names.MOVED_OF_EXPORTED:
        old, new = importlib.import_module(moved.legacy), importlib.import_module(moved.replacement)
        for name in moved.names:
            if not hasattr(old, name):
                setattr(old, name, getattr(new, name))
    dynamo = importlib.import_module("torch._dynamo")
    dynamo.export = _capturing_aten(dynamo.export)  # type: ignore[attr-defined]


class _FreeSize:
    """What ``dynamic_dim(tensor, dimension)`` returned: a constraint, which comparisons gave a range."""

    def __init__(self, tensor: Tensor, dimension: int) -> None:
        self.tensor, self.dimension = tensor, dimension

    def __le__(self, other: object) -> _FreeSize:
        return self

    __lt__ = __ge__ = __gt__ = __le__


def _shapes(args: tuple[Any, ...], constraints: Sequence[_FreeSize]) -> Any:
    free = [{c.dimension: torch.export.Dim.AUTO for c in constraints if c.tensor is arg} for arg in args]
    return tuple(dims or None for dims in free)


def _capture(removed: names.RemovedCapture) -> Callable[..., Any]:
    def capture(
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        dynamic_shapes: Any = None,
        constraints: Sequence[_FreeSize] | None = None,
        **settings: Any,
    ) -> Any:
        if removed.gave_module:
            # The removed function traced with Dynamo; Quantizers need the source functions it records.
            settings.setdefault("strict", True)
        if constraints and dynamic_shapes is None:
            dynamic_shapes = _shapes(args, constraints)
        program = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes, **settings)
        return program.module() if removed.gave_module else program

    capture.__name__ = removed.name
    capture.__module__ = removed.module
    return capture


def _capturing_aten(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``torch._dynamo.export``, which for ``aten_graph=True`` gives what PT2E's flow takes today."""

    @wraps(original)
    def export(f: Any, *args: Any, aten_graph: bool = False, **settings: Any) -> Any:
        if not aten_graph or not isinstance(f, nn.Module):
            return original(f, *args, aten_graph=aten_graph, **settings)

        def captured(*inputs: Any) -> Any:
            free = tuple(dict.fromkeys(range(x.dim()), torch.export.Dim.AUTO) for x in inputs)
            dynamic_shapes = free if settings.get("tracing_mode") == "symbolic" else None
            program = torch.export.export(f, inputs, dynamic_shapes=dynamic_shapes, strict=True)
            return DynamoResult(program.module(), set())

        return captured(*args) if args else captured

    return export


class DynamoResult(NamedTuple):
    """What ``torch._dynamo.export`` returns: the graph module and the guards."""

    graph_module: nn.Module
    guards: set[Any]


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
        if not attribute.startswith("_") and hasattr(torch_ao, attribute):
            return getattr(torch_ao, attribute)
        raise AttributeError(
            f"module {name!r} has no attribute {attribute!r}: torch has removed the module, and "
            "torchq_compat has only what quantizes in its place"
        )

    vars(module).update({"__getattr__": passed_on, STANDS_IN: True})
    return module
