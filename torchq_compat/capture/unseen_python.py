"""``tensor.data`` and ``len(tensor)`` during capture: what scripts write and torch.export does not see.

``data`` is no operator: what it returns hangs on nothing that was traced, and becomes a constant of the
program that has no values. ``detach()`` is the same tensor to a graph. ``len`` returns a plain integer, which
fixes the size for good; ``size(0)`` is the same number and stays free. FX has ``torch.fx.wrap("len")`` for
that, which changes the globals of the user's module while it traces. Here the methods of the package's own
copy of the model are bound again, with globals of their own; functions they call keep Python's ``len``.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import update_wrapper
from types import FunctionType, MethodType
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
    bound: list[tuple[nn.Module, str]] = []
    try:
        for module in model.modules():
            for name, method in _methods_with_len(type(module)).items():
                if name not in vars(module):
                    vars(module)[name] = MethodType(_with_length(method, length), module)
                    bound.append((module, name))
        with _DetachedData():
            yield
    finally:
        for module, name in bound:
            del vars(module)[name]


def with_seen_python(model: nn.Module, export: Callable[[], Exported]) -> Exported:
    """Return ``export()``, during which both are seen in the code of ``model``, a copy of the user's."""
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


def _methods_with_len(module_type: type[nn.Module]) -> dict[str, FunctionType]:
    """Return the methods of a class of the user's whose code asks for a length, by name."""
    found: dict[str, Any] = {}
    for base in reversed(module_type.__mro__):
        found.update(vars(base))
    return {
        name: method
        for name, method in found.items()
        if isinstance(method, FunctionType)
        and not name.startswith("__")
        and LEN in method.__code__.co_names
        and LEN not in method.__globals__
        and str(method.__globals__.get("__name__")).partition(".")[0] not in LIBRARIES
    }


def _with_length(method: FunctionType, length: Callable[[Any], Any]) -> FunctionType:
    names = {**method.__globals__, LEN: length}
    made = FunctionType(method.__code__, names, method.__name__, method.__defaults__, method.__closure__)
    made.__kwdefaults__ = method.__kwdefaults__
    return update_wrapper(made, method)  # type: ignore[return-value]
