"""``tensor.data``, ``len(tensor)`` and ``int(size)`` during capture: what scripts write and torch.export does
not see.

``data`` is no operator: what it returns hangs on nothing that was traced, and becomes a constant of the
program that has no values. ``detach()`` is the same tensor to a graph. ``len`` and ``int`` return a plain
integer, which fixes the size for good; ``size(0)`` is the same number and stays free, and so does
``torch.sym_int`` of it, and the ``item()`` of a tensor of one integer. FX has ``torch.fx.wrap("len")`` for
that, which changes the globals of the user's module while it traces. Here the methods of the package's own
copy of the model are bound again, with globals of their own; functions they call keep Python's own.
"""

from __future__ import annotations

import builtins
import dis
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import update_wrapper
from types import CodeType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode

__all__ = ["with_seen_python"]

DATA: Any = torch.Tensor.data
#: Whose code does not ask tensors for numbers.
LIBRARIES = ("torch", __name__.partition(".")[0])
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
Exported = TypeVar("Exported")
#: What methods call instead of Python's own, by name.
Replaced = Mapping[str, Callable[..., Any]]


@contextmanager
def _seen_python(model: nn.Module, replaced: Replaced) -> Iterator[None]:
    bound: list[tuple[nn.Module, str]] = []
    try:
        for module in model.modules():
            for name, method in _own_methods(type(module)).items():
                called = {each: replaced[each] for each in replaced if _may_replace(method, each)}
                if called and name not in vars(module):
                    vars(module)[name] = MethodType(_with_names(method, called), module)
                    bound.append((module, name))
        with _DetachedData():
            yield
    finally:
        for module, name in bound:
            del vars(module)[name]


def with_seen_python(model: nn.Module, export: Callable[[], Exported]) -> Exported:
    """Return ``export()``, during which all are seen in the code of ``model``, a copy of the user's."""
    asked = False

    def length(value: Any) -> Any:
        nonlocal asked
        if not isinstance(value, Tensor) or not value.dim() or get_proxy_mode() is None:
            return builtins.len(value)
        asked = True
        return value.shape[0]

    def integer(value: Any = 0, *base: Any) -> Any:
        nonlocal asked
        is_size = isinstance(value, (torch.SymInt, torch.SymFloat))
        is_one = isinstance(value, Tensor) and value.dtype in INTEGERS
        if not (is_size or is_one) or get_proxy_mode() is None:
            return builtins.int(value, *base)
        asked = True
        found: Any = torch.sym_int(value) if is_size else value.item()  # type: ignore[no-untyped-call]
        return found

    try:
        with _seen_python(model, {"len": length, "int": integer}):
            return export()
    except Exception:
        if not asked:
            raise
    # A symbol is no key of a dict, and no int to whoever looks at its class.
    with _seen_python(model, {}):
        return export()


class _DetachedData(TorchFunctionMode):
    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # A slot's getter is another object each time it is asked for.
        if function == DATA.__get__ and get_proxy_mode() is not None:
            return args[0].detach()
        return function(*args, **(kwargs or {}))


def _own_methods(module_type: type[nn.Module]) -> dict[str, FunctionType]:
    """Return the methods of a class of the user's by name."""
    found: dict[str, Any] = {}
    for base in reversed(module_type.__mro__):
        found.update(vars(base))
    return {
        name: method
        for name, method in found.items()
        if isinstance(method, FunctionType)
        and not name.startswith("__")
        and str(method.__globals__.get("__name__")).partition(".")[0] not in LIBRARIES
    }


def _may_replace(method: FunctionType, name: str) -> bool:
    """Return whether ``method`` reads Python's own ``name``, and calls it where that is a class: what else is
    done with a class, nothing in its place can do."""
    if name in method.__globals__:
        return False
    uses = list(_uses(method.__code__, name))
    return bool(uses) and (all(uses) or not isinstance(getattr(builtins, name), type))


def _uses(code: CodeType, name: str) -> Iterator[bool]:
    """Yield of every place that reads the global ``name`` whether it is to call it."""
    for instruction in dis.get_instructions(code) if name in code.co_names else ():
        if instruction.opname == "LOAD_GLOBAL" and instruction.argval == name:
            # The lowest bit says that room is made for a call.
            yield bool((instruction.arg or 0) & 1)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _uses(constant, name)


def _with_names(method: FunctionType, called: Replaced) -> FunctionType:
    names = {**method.__globals__, **called}
    made = FunctionType(method.__code__, names, method.__name__, method.__defaults__, method.__closure__)
    made.__kwdefaults__ = method.__kwdefaults__
    return update_wrapper(made, method)  # type: ignore[return-value]
