"""Weights of which ``fully_shard`` gave each rank a part: gathered one at a time, by all ranks together.

Convert copies a sharded model with its parts, and gathers a weight where it reads it. So the floats that a
rank holds at a time are those of one weight of the graph, or of one custom module.
"""

import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import GraphModule

from torchq_compat.errors import ConvertError

#: What a rank says in place of a weight, which is a number below: that it is done, or, with its number added,
#: that it has failed.
DONE, FAILED = 1 << 40, 1 << 41
#: The mesh whose ranks convert a model, in this context.
_MESH: ContextVar[Any] = ContextVar("mesh", default=None)


def is_sharded(tensor: Any) -> bool:
    """Return whether each rank has a part of ``tensor`` only."""
    if not dist.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def sharing_ranks(model: nn.Module) -> set[int]:
    """Return the ranks that have parts of the weights of ``model``; none if it is not sharded."""
    parts: list[Any] = [parameter for parameter in model.parameters() if is_sharded(parameter)]
    return {int(rank) for part in parts[:1] for rank in part.device_mesh.mesh.flatten()}


@contextmanager
def converting_together(model: nn.Module) -> Iterator[dict[int, Any]]:
    """Yield the memo with which ``copy.deepcopy`` copies ``model`` but for the parts of its weights, and let
    the ranks that share them gather inside the ``with`` block. One that fails there fails on all of them.

    Raises:
        ConvertError: there is no process group, or another rank failed or gathers something else.
    """
    parts: list[Any] = [parameter for parameter in model.parameters() if is_sharded(parameter)]
    memo = {id(part): part for part in parts}
    if not parts or _MESH.get() is not None:
        yield memo
        return
    if not dist.is_initialized():
        raise ConvertError.of("TQ950.sharded_alone")
    token = _MESH.set(parts[0].device_mesh)
    try:
        with _without_fsdp(model):
            yield memo
        _agree(DONE)
    except Exception:
        if _MESH.get() is not None:
            _agree(FAILED + dist.get_rank())
        raise
    finally:
        _MESH.reset(token)


def _agree(step: int) -> None:
    """Raise, on each of them, unless all ranks of the mesh take the same ``step``: gathering would hang, or
    mix weights. A rank that has failed raises its own error."""
    mesh = _MESH.get()
    extremes = torch.tensor([step, -step], device=mesh.device_type)
    for dimension in range(mesh.ndim):
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=mesh.get_group(dimension))
    most, least = extremes.tolist()
    if most != -least and step < FAILED:
        _MESH.set(None)
        if most >= FAILED:
            raise ConvertError.of("TQ950.failed_rank", rank=most - FAILED)
        raise ConvertError.of("TQ950.other_steps")


def whole(tensor: Tensor, name: str) -> Tensor:
    """Return ``tensor``, the weight ``name``, with the parts of all ranks, each of which has to call this."""
    if not is_sharded(tensor):
        return tensor
    part: Any = tensor.detach()
    _agree(zlib.crc32(name.encode()))
    # The parts may be on the CPU, whose process group the mesh does not have.
    gathered: Tensor = part.to(part.device_mesh.device_type).full_tensor().to(part.device)
    return gathered


@contextmanager
def whole_inside(module: nn.Module, path: str) -> Iterator[None]:
    """Give ``module``, which is at ``path``, and the modules in it whole parameters in the ``with`` block."""
    owners = [(item, _sharded_of(item)) for item in module.modules()]
    make_whole(module, path)
    try:
        yield
    finally:
        for owner, parameters in owners:
            owner._parameters.update(parameters)


def _sharded_of(module: nn.Module) -> dict[str, nn.Parameter]:
    parts = module._parameters.items()
    return {name: part for name, part in parts if part is not None and is_sharded(part)}


def make_whole(module: nn.Module, path: str) -> None:
    """Give ``module``, which is at ``path``, and the modules in it whole parameters."""
    gathered: dict[int, nn.Parameter] = {}
    for where, owner in module.named_modules(prefix=path):
        for name, part in _sharded_of(owner).items():
            if id(part) not in gathered:
                value = whole(part, f"{where}.{name}")
                gathered[id(part)] = nn.Parameter(value, requires_grad=part.requires_grad)
            owner._parameters[name] = gathered[id(part)]


@contextmanager
def _without_fsdp(model: nn.Module) -> Iterator[None]:
    """Give the modules of ``model`` the classes, hooks and attributes from before ``fully_shard``: its class
    refuses copies, and the rest holds process groups."""
    from torch.distributed.fsdp import FSDPModule

    before: list[tuple[Any, type, dict[str, Any]]] = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            before.append((module, type(module), dict(vars(module))))
    try:
        for module, cls, attributes in before:
            module.__class__ = _class_before(cls)
            for name, value in attributes.items():
                if name.startswith("__composable_api"):
                    del vars(module)[name]
                elif name.endswith("_hooks") and isinstance(value, dict):
                    own = ((key, hook) for key, hook in value.items() if not is_of_fsdp(hook))
                    vars(module)[name] = type(value)(own)
        yield
    finally:
        for module, cls, attributes in before:
            module.__class__ = cls
            vars(module).update(attributes)


def _class_before(cls: type) -> type:
    """Return the class that a module had before ``fully_shard`` gave it ``cls``; else ``cls``."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    is_sharded_class = fsdp is not None and issubclass(cls, fsdp.FSDPModule)
    return cls.__mro__[2] if is_sharded_class else cls  # After FSDP's own class and FSDPModule.


@contextmanager
def of_class_before(module: nn.Module) -> Iterator[None]:
    """Give ``module`` the class from before ``fully_shard`` in the ``with`` block."""
    cls = type(module)
    module.__class__ = _class_before(cls)
    try:
        yield
    finally:
        module.__class__ = cls


def is_of_fsdp(hook: Any) -> bool:
    """Return whether ``hook``, which torch may have wrapped, is a function of torch.distributed."""
    function = getattr(hook, "hook", hook)
    return str(getattr(function, "__module__", "")).startswith("torch.distributed.")


def call_hooks_of_parts(model: GraphModule) -> None:
    """Let a sharded ``model`` call what ``fully_shard`` hooked to parts of it that its graph does not call:
    their weights are gathered with those of the model."""
    if not any(map(is_of_fsdp, list(model._forward_pre_hooks.values()))):
        return
    for part in _not_called(model):
        for key, hook in list(part._forward_pre_hooks.items()):
            if is_of_fsdp(hook):
                del part._forward_pre_hooks[key]
                model.register_forward_pre_hook(hook, with_kwargs=True)
        for key, hook in list(part._forward_hooks.items()):
            if is_of_fsdp(hook):
                del part._forward_hooks[key]
                always = key in part._forward_hooks_always_called
                model.register_forward_hook(hook, prepend=True, always_call=always)


def _not_called(model: GraphModule) -> Iterator[nn.Module]:
    """Yield the modules in ``model`` that neither its graph nor one in it calls, outer ones first."""
    called = {model.get_submodule(str(node.target)) for node in model._graph.find_nodes(op="call_module")}
    waiting = list(model.children())
    while waiting:
        module = waiting.pop()
        if module not in called:
            yield module
            waiting += module.children()
        elif isinstance(module, GraphModule):
            yield from _not_called(module)
