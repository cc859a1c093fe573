"""Where a node of an exported graph came from, in the terms of the FX graph it would have been.

FX traced user modules and kept modules of torch.nn as single nodes. An exported graph has aten operators
only, with the module stack (``nn_module_stack``) and the Python function (``torch_fn``) in their metadata;
everything else that needs to know a node's origin asks here.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Node

from torchq_compat.legacy.qconfig_mappings import ObjectType

__all__ = ["Origin", "find_origin", "is_fx_leaf"]

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
    """

    call: str
    module_path: str
    module_type: type[nn.Module]
    object_types: tuple[ObjectType, ...]
    is_module_call: bool


def find_origin(node: Node, model: nn.Module) -> Origin:
    """The origin of ``node`` in ``model``, the module that was exported."""
    path, module_type = "", type(model)
    for key, fqn in _module_calls(node):
        module = _submodule(model, fqn)
        if module is None:
            continue
        path, module_type = fqn, type(module)
        if fqn and is_fx_leaf(module):
            return Origin(key, fqn, module_type, (module_type,), is_module_call=True)
    return Origin(node.name, path, module_type, tuple(_function_types(node)), is_module_call=False)


def is_fx_leaf(module: nn.Module) -> bool:
    """Whether FX's tracer keeps ``module`` as one node: classes of torch.nn, but not Sequential."""
    home = type(module).__module__
    return home.startswith(("torch.nn", "torch.ao.nn")) and not isinstance(module, nn.Sequential)


def _module_calls(node: Node) -> Iterator[tuple[str, str]]:
    """(call key, module path), outermost first."""
    for key, (fqn, _) in (node.meta.get("nn_module_stack") or {}).items():
        yield key, str(fqn)


def _submodule(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


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
