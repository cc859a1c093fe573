"""The origin of a node of an exported graph, and what of a model has none: attributes and hooks."""

import operator
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Node

from torchq_compat.capture.unseen_python import wrapped_call_of
from torchq_compat.read.qconfig_mappings import ObjectType
from torchq_compat.support.graph_nodes import module_at
from torchq_compat.support.torch_ao import fused_module

# The origin of a node of an exported graph, in terms of the graph that FX would have traced.
#
# FX traced user modules and kept modules of torch.nn as single nodes. An exported graph has only aten
# operators, with the module stack (``nn_module_stack``) and the Python function (``torch_fn``) in their
# metadata. All code that needs a node's origin uses this module.


#: Python modules with the functions that ``torch_fn`` names "builtin_function_or_method".
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
    """The FX node that a node of an exported graph would belong to.

    Attributes:
        call: an identifier of the call, the same for all nodes of one call of a torch.nn module.
        module_path: the path of the torch.nn module, or of the module whose code calls the function.
        module_type: the class of the module at ``module_path``.
        object_types: the names of the op in FX's configuration, most specific first.
        is_module_call: whether the call is of a torch.nn module, not of a function or method.
        wrapped: the name of the function under ``torch.fx.wrap`` around the node; empty if there is none.
    """

    call: str
    module_path: str
    module_type: type[nn.Module]
    object_types: tuple[ObjectType, ...]
    is_module_call: bool
    wrapped: str = ""

    @property
    def caller(self) -> str:
        """The path of the module whose code makes the call."""
        return self.module_path.rpartition(".")[0] if self.is_module_call else self.module_path


def find_origin(node: Node, model: nn.Module | None) -> Origin:
    """Return the origin of ``node`` in ``model``, the exported module; if ``model`` is None, find classes by
    their names in the node's metadata."""
    path, module, module_type = "", model, nn.Module if model is None else type(model)
    for key, fqn, class_name in _module_calls(node):
        if model is None or module is None:
            result = _class_by_name(class_name)
        else:
            # From the module around it: from the model, the time would be quadratic in the depth.
            is_inside = fqn.startswith(f"{path}.")
            inner = module_at(module, fqn[len(path) + 1 :]) if is_inside else module_at(model, fqn)
            if inner is None:
                continue
            module, result = inner, type(inner)
        path, module_type = fqn, result
        if fqn and is_fx_leaf_class(result) and wrapped_call_of(node) is None:
            return Origin(key, fqn, module_type, (module_type,), is_module_call=True)
    if isinstance(module, fused_module):
        module_type = type(module[0])  # FX selects the QConfig of a fused module by the first one in it.
    if (wrapped := wrapped_call_of(node)) is not None:
        name, index = wrapped
        return Origin(f"{name}#{index}", path, module_type, (), is_module_call=False, wrapped=name)
    return Origin(node.name, path, module_type, tuple(_function_types(node)), is_module_call=False)


def innermost_call(node: Node) -> tuple[str, type[nn.Module]] | None:
    """Return the key of the innermost module call that ``node`` is in, and the class of the module; None if
    it is in no module call."""
    *_, last = (None, *_module_calls(node))
    return None if last is None else (last[0], _class_by_name(last[2]))


def meta_outside_leaves(node: Node) -> dict[str, Any]:
    """Return the metadata of ``node`` for a new node beside it. Calls of modules that FX keeps as one node
    are removed from the module stack, so that the new node does not count as part of such a call."""
    meta = dict(node.meta)
    if leaves := [key for key, _, name in _module_calls(node) if is_fx_leaf_class(_class_by_name(name))]:
        calls = list(node.meta["nn_module_stack"].items())
        first = next(index for index, (key, _) in enumerate(calls) if key == leaves[0])
        meta["nn_module_stack"] = dict(calls[:first])
    return meta


def callers_of_leaf(node: Node) -> list[Origin]:
    """Return the possible origins of an item of the results of the torch.nn module that ``node`` is part of:
    the code of each module around that module, innermost first."""
    callers: list[tuple[str, type[nn.Module]]] = [("", nn.Module)]
    for _, fqn, class_name in _module_calls(node):
        result = _class_by_name(class_name)
        if fqn and is_fx_leaf_class(result):
            break
        callers.append((fqn, result))
    return [
        Origin(node.name, path, module_type, (operator.getitem,), is_module_call=False)
        for path, module_type in reversed(callers)
    ]


def is_fx_leaf(module: nn.Module) -> bool:
    """Return whether FX's tracer keeps ``module`` as one node: modules of torch.nn, except Sequential."""
    return is_fx_leaf_class(type(module))


def is_fx_leaf_class(module_type: type[nn.Module]) -> bool:
    """Return ``is_fx_leaf`` for modules of class ``module_type``; nn.Module itself, which means a class that
    was not found, is no leaf."""
    is_torch_own = module_type.__module__.startswith(("torch.nn", "torch.ao.nn"))
    return is_torch_own and module_type is not nn.Module and not issubclass(module_type, nn.Sequential)


def _module_calls(node: Node) -> Iterator[tuple[str, str, str]]:
    """Yield (call key, module path, class name), outermost first."""
    for key, (fqn, kind) in (node.meta.get("nn_module_stack") or {}).items():
        yield key, str(fqn), kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"


def _class_by_name(name: str) -> type[nn.Module]:
    """Return the module class called ``name``; nn.Module itself if it cannot be found, as a class defined in
    a function."""
    try:
        result = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError):
        return nn.Module
    return result if isinstance(result, type) and issubclass(result, nn.Module) else nn.Module


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
        result = getattr(home, name, None)
        if callable(result) and result not in seen:
            seen.append(result)
            yield result


def computes_like(result: type[nn.Module], base: type[nn.Module]) -> bool:
    """Return whether ``result`` is ``base``, or is derived from ``base``, a class of torch.nn, and inherits
    its ``forward``."""
    if result is base:
        return True
    return (
        base.__module__.startswith("torch.nn.")
        and issubclass(result, base)
        and result.forward is base.forward
    )
