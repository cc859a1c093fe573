"""``tensor.data`` and ``len(tensor)`` during capture: what scripts write and torch.export does not see.

``data`` is no operator: what it returns hangs on nothing that was traced, and becomes a constant of the
program that has no values. ``detach()`` is the same tensor to a graph. ``len`` returns a plain integer, which
fixes the size for good; ``size(0)`` is the same number and stays free. FX has ``torch.fx.wrap("len")`` for
that; as FX does with such names, ``len`` is put into the globals of the model's own code while it is traced.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode

__all__ = ["with_seen_python"]

DATA: Any = torch.Tensor.data
LEN = "len"
#: Whose code does not ask tensors for their length.
LIBRARIES = ("torch", __name__.partition(".")[0])
Exported = TypeVar("Exported")


@contextmanager
def _seen_python(model: nn.Module, length: Callable[[Any], Any]) -> Iterator[None]:
    changed = [namespace for namespace in _namespaces(model) if LEN not in namespace]
    for namespace in changed:
        namespace[LEN] = length
    try:
        with _DetachedData():
            yield
    finally:
        for namespace in changed:
            del namespace[LEN]


def with_seen_python(model: nn.Module, export: Callable[[], Exported]) -> Exported:
    """Return ``export()``, during which both are seen in the code of ``model``."""
    asked = False

    def length(value: Any) -> Any:
        nonlocal asked
        if not isinstance(value, Tensor) or not value.dim() or get_proxy_mode() is None:
            return builtins.len(value)
        asked = True
        return value.shape[0]

    try:
        with _seen_python(model, length):
            return export()
    except TypeError:
        if not asked:
            raise
    # A symbol is no key of a dict, and no int to whoever looks at its class.
    with _seen_python(model, builtins.len):
        return export()


class _DetachedData(TorchFunctionMode):
    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # A slot's getter is another object each time it is asked for.
        if function == DATA.__get__ and get_proxy_mode() is not None:
            return args[0].detach()
        return function(*args, **(kwargs or {}))


def _namespaces(model: nn.Module) -> list[dict[str, Any]]:
    """The globals of the methods of all modules of ``model`` that are not torch's own."""
    found: dict[int, dict[str, Any]] = {}
    for each in {base for module in model.modules() for base in type(module).__mro__}:
        for function in vars(each).values():
            if isinstance(function, FunctionType):
                name = str(function.__globals__.get("__name__", ""))
                if name.partition(".")[0] not in LIBRARIES:
                    found[id(function.__globals__)] = function.__globals__
    return list(found.values())
