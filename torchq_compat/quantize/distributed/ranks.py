"""What convert does under a process group: takes wrappers off, and says when the ranks differ."""

from __future__ import annotations

import copy
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn

from torchq_compat.errors import ConvertError
from torchq_compat.model.graph_module import Stage, record_of
from torchq_compat.quantize.distributed.merge_observers import digest, is_merged, observers_of
from torchq_compat.quantize.distributed.merge_rules import state_of
from torchq_compat.quantize.distributed.wrappers import is_sharded, unwrapped
from torchq_compat.support.upstream import default_store
from torchq_compat.support.user_warnings import warn_user

#: How long a rank looks for the other ranks' numbers. It must not wait for good: many scripts convert on
#: rank 0 only.
WAIT = timedelta(seconds=3)
#: Structure of a model -> how many like it this process has converted.
_CONVERTED: Counter[int] = Counter()


def ready_to_convert(model: Any, function: str) -> Any:
    """Return ``model`` without the wrappers of torch.distributed and with whole weights, and warn if the
    ranks have different observers.

    Raises:
        ConvertError: the weights cannot be put together here.
    """
    model = unwrapped(model, function)
    record = record_of(model)
    if record is None or record.stage is not Stage.PREPARED:
        return model
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        _warn_of_other_ranks(model, function, is_trained=record.is_qat)
    return _gathered(model) if any(map(is_sharded, model.parameters())) else model


def _warn_of_other_ranks(model: nn.Module, function: str, *, is_trained: bool) -> None:
    """Compare one number with the ranks that convert too, through the store of the process group: a
    collective would hang where only some ranks convert."""
    units = observers_of(model)
    if units and all(is_merged(unit, dist.get_world_size()) for unit in units.values()):
        return
    structure = zlib.crc32("\n".join(model.state_dict()).encode())
    _CONVERTED[structure] += 1
    prefix = f"torchq_compat/convert/{structure}/{_CONVERTED[structure]}"
    rank, world = dist.get_rank(), dist.get_world_size()
    own = str(_digest_of(model, units)).encode()
    store = default_store()
    store.set(f"{prefix}/{rank}", own)
    keys = {other: f"{prefix}/{other}" for other in range(world) if other != rank}
    try:
        store.wait(list(keys.values()), WAIT)
        present = keys
    except RuntimeError:  # the time is up
        present = {other: key for other, key in keys.items() if store.check([key])}
    differing = [other for other, key in present.items() if store.get(key) != own]
    if differing:
        problem = f"the observers of rank {rank} differ from those of rank {', '.join(map(str, differing))}"
    elif len(present) < len(keys) and not is_trained:
        problem = (
            f"rank {rank} converts with the ranges that it saw itself; the observers of {world} processes "
            "were not merged"
        )
    else:
        return
    warn_user(
        "TQ420",
        f"{function}: {problem}.\nHint: call torchq_compat.merge_observers(prepared) on every rank before; "
        "the model is not that of one process over all the data.",
    )


def _digest_of(model: nn.Module, units: Mapping[str, nn.Module]) -> int:
    values: dict[str, Any] = {
        f"{path}.{name}": value for path, unit in units.items() for name, value in state_of(unit).items()
    }
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    inside = tuple(f"{path}." for path in units)
    values |= {n: t for n, t in tensors.items() if not n.startswith(inside) and not is_sharded(t)}
    return digest(values)


def _gathered(model: nn.Module) -> nn.Module:
    """Return a copy of ``model``, sharded by ``fully_shard``, with whole parameters, gathered one by one.
    Every rank of the mesh has to take part."""
    if not dist.is_initialized():
        raise ConvertError(
            "convert: the model is sharded, and there is no process group to gather its weights.",
            hint="convert before destroy_process_group(), on every rank.",
        )
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    parameters: Any = model.parameters()
    whole: dict[int, Any] = {
        id(parameter): nn.Parameter(parameter.full_tensor().detach(), requires_grad=parameter.requires_grad)
        for parameter in parameters
        if is_sharded(parameter)
    }
    with _without_fsdp(model):
        return copy.deepcopy(model, whole)


@contextmanager
def _without_fsdp(model: nn.Module) -> Iterator[None]:
    """Give the modules of ``model`` the classes, hooks and attributes from before ``fully_shard``: its class
    refuses copies, and the rest holds process groups."""
    from torch.distributed.fsdp import FSDPModule

    before: list[tuple[Any, type, dict[str, Any]]] = [
        (module, type(module), dict(vars(module)))
        for module in model.modules()
        if isinstance(module, FSDPModule)
    ]
    try:
        for module, cls, attributes in before:
            module.__class__ = cls.__mro__[2]  # After FSDP's own class and FSDPModule.
            for name, value in attributes.items():
                if name.startswith("__composable_api"):
                    del vars(module)[name]
                elif name.endswith("_hooks") and isinstance(value, dict):
                    own = ((key, hook) for key, hook in value.items() if not _is_fsdp(hook))
                    vars(module)[name] = type(value)(own)
        yield
    finally:
        for module, cls, attributes in before:
            module.__class__ = cls
            vars(module).update(attributes)


def _is_fsdp(hook: Any) -> bool:
    """Return whether ``hook``, which torch may have wrapped, is a function of torch.distributed."""
    function = getattr(hook, "hook", hook)
    return str(getattr(function, "__module__", "")).startswith("torch.distributed.")
