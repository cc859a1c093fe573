"""Where a node of an exported graph came from, in the terms of the FX graph it would have been.

FX traced user modules and kept modules of torch.nn as single nodes. An exported graph has aten operators
only, with the module stack (``nn_module_stack``) and the Python function (``torch_fn``) in their metadata;
everything else that needs to know a node's origin asks here.
"""

from __future__ import annotations

import operator
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Node

from torchq_compat.capture.wrapped_functions import wrapped_call_of
from torchq_compat.config.qconfig_mappings import ObjectType

__all__ = [
    "Origin",
    "callers_of_leaf",
    "computes_like",
    "find_origin",
    "innermost_call",
    "is_fx_leaf",
    "meta_outside_leaves",
]

#: Modules whose functions ``torch_fn`` calls "builtin_function_or_method".
BUILTIN_HOMES = (torch, torch._C._nn)
#: Methods that a Python operator calls; the metadata of ``x + y`` and ``x.add(y)`` is the same. FX traces
#: ``x += y`` as ``x + y``.
OPERATOR_OF_METHOD = {
    "add": operator.add,
    "add_": operator.add,
    "mul": operator.mul,
    "mul_": operator.mul,
    "sub": operator.sub,
    "floor_divide": operator.floordiv,
}


@dataclass(frozen=True)
class Origin:
    """The FX node a node belongs to.

    Attributes:
        call: identifies the call: the same for all nodes of one call of a torch.nn module.
        module_path: of the torch.nn module, or of the module whose code calls the function.
        module_type: its class.
        object_types: what FX's configuration would call the op, most specific first.
        is_module_call: a torch.nn module, as opposed to a function or method.
        wrapped: name of the function under ``torch.fx.wrap`` it is inside of; empty for most.
    """

    call: str
    module_path: str
    module_type: type[nn.Module]
    object_types: tuple[ObjectType, ...]
    is_module_call: bool
    wrapped: str = ""


def find_origin(node: Node, model: nn.Module | None) -> Origin:
    """Return the origin of ``node`` in ``model``, the module that was exported; where only the graph is at
    hand, classes are found by the names it holds."""
    path, module_type = "", nn.Module if model is None else type(model)
    for key, fqn, class_name in _module_calls(node):
        found = _class_by_name(class_name) if model is None else _class_in(model, fqn)
        if found is None:
            continue
        path, module_type = fqn, found
        if fqn and is_fx_leaf_class(found) and wrapped_call_of(node) is None:
            return Origin(key, fqn, module_type, (module_type,), is_module_call=True)
    if (wrapped := wrapped_call_of(node)) is not None:
        name, index = wrapped
        return Origin(f"{name}#{index}", path, module_type, (), is_module_call=False, wrapped=name)
    return Origin(node.name, path, module_type, tuple(_function_types(node)), is_module_call=False)


def innermost_call(node: Node) -> tuple[str, type[nn.Module]] | None:
    """Return the call of a module whose code ``node`` is, and its class; None outside of modules."""
    *_, last = (None, *_module_calls(node))
    return None if last is None else (last[0], _class_by_name(last[2]))


def meta_outside_leaves(node: Node) -> dict[str, Any]:
    """Return the metadata of ``node`` for one that is put beside it: a call of a module that FX keeps as one
    node has no more nodes than it had."""
    meta = dict(node.meta)
    leaves = [key for key, _, name in _module_calls(node) if is_fx_leaf_class(_class_by_name(name))]
    if leaves:
        calls = list(node.meta["nn_module_stack"].items())
        first = next(index for index, (key, _) in enumerate(calls) if key == leaves[0])
        meta["nn_module_stack"] = dict(calls[:first])
    return meta


def callers_of_leaf(node: Node) -> list[Origin]:
    """Return the origins that an item of the results of the module which ``node`` is a part of may have: the
    code of each module around it, innermost first."""
    callers: list[tuple[str, type[nn.Module]]] = [("", nn.Module)]
    for _, fqn, class_name in _module_calls(node):
        found = _class_by_name(class_name)
        if fqn and is_fx_leaf_class(found):
            break
        callers.append((fqn, found))
    return [
        Origin(node.name, path, module_type, (operator.getitem,), is_module_call=False)
        for path, module_type in reversed(callers)
    ]


def is_fx_leaf(module: nn.Module) -> bool:
    """Return whether FX's tracer keeps ``module`` as one node: classes of torch.nn, but not Sequential."""
    return is_fx_leaf_class(type(module))


def is_fx_leaf_class(module_type: type[nn.Module]) -> bool:
    """Return ``is_fx_leaf`` of the modules of a class; nn.Module itself stands for one that is not found."""
    is_torch_own = module_type.__module__.startswith(("torch.nn", "torch.ao.nn"))
    return is_torch_own and module_type is not nn.Module and not issubclass(module_type, nn.Sequential)


def _module_calls(node: Node) -> Iterator[tuple[str, str, str]]:
    """Yield (call key, module path, class name), outermost first."""
    for key, (fqn, kind) in (node.meta.get("nn_module_stack") or {}).items():
        yield key, str(fqn), kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"


def _class_in(model: nn.Module, path: str) -> type[nn.Module] | None:
    try:
        return type(model.get_submodule(path))
    except AttributeError:
        return None


def _class_by_name(name: str) -> type[nn.Module]:
    """Return nn.Module itself for a class inside a function, which cannot be found."""
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError):
        return nn.Module
    return found if isinstance(found, type) and issubclass(found, nn.Module) else nn.Module


def _function_types(node: Node) -> Iterator[ObjectType]:
    _, _, qualified = node.meta.get("torch_fn", ("", ""))[-1].rpartition(" ")
    kind, _, name = qualified.partition(".")
    if kind == "method_descriptor":
        yield name
        if name in OPERATOR_OF_METHOD:
            yield OPERATOR_OF_METHOD[name]
        return
    homes: tuple[Any, ...] = (F, *BUILTIN_HOMES) if kind == "function" else BUILTIN_HOMES
    seen: list[Any] = []
    for home in homes:
        found = getattr(home, name, None)
        if callable(found) and found not in seen:
            seen.append(found)
            yield found


def computes_like(found: type[nn.Module], base: type[nn.Module]) -> bool:
    """Return whether ``found`` is ``base``, a class of torch.nn, or one that has its forward from it."""
    if found is base:
        return True
    return (
        base.__module__.startswith("torch.nn.") and issubclass(found, base) and found.forward is base.forward
    )
