"""What convert does under a process group: it unwraps, gathers weights, and says when the ranks differ."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from threading import Event
from typing import Any

import torch.distributed as dist
from torch import nn

from torchq_compat.errors import ConvertError
from torchq_compat.model.graph_module import Stage, record_of
from torchq_compat.quantize.distributed.merge_observers import digest, is_merged, observers_of
from torchq_compat.quantize.distributed.merge_rules import state_of
from torchq_compat.quantize.distributed.wrappers import is_sharded, unwrapped
from torchq_compat.read.qspecs import FAKE_QUANTIZES
from torchq_compat.support.upstream import default_store
from torchq_compat.support.user_warnings import warn_user

#: How long a rank looks for the other ranks' numbers. It must not wait for good: many scripts convert on
#: rank 0 only.
WAIT = timedelta(seconds=3)
#: Set once a rank has waited in vain: such a script converts on one rank, and waits no more.
_ALONE = Event()
#: Structure of a model -> how many like it this process has converted.
_CONVERTED: Counter[int] = Counter()


def ready_to_convert(model: Any, function: str) -> Any:
    """Return ``model`` without the wrappers of torch.distributed, and warn if the ranks have different
    observers.

    Raises:
        ConvertError: a wrapper has only parts of its weights.
    """
    model = unwrapped(model, function)
    record = record_of(model)
    if record is not None and record.stage is Stage.PREPARED:
        meet_other_ranks(model, function)
    return model


def meet_other_ranks(model: nn.Module, function: str) -> None:
    """Compare one number with the ranks that convert too, through the store of the process group: a
    collective would hang where only some ranks convert.

    The rank that comes last finds the numbers of all others and warns. One that comes first waits for them
    only if it has to tell something else: that nothing was merged, or that it waits for their weights.
    """
    if not dist.is_available() or not dist.is_initialized() or default_store() is None:
        return  # None: that of MPI
    units, rank, world = observers_of(model), dist.get_rank(), dist.get_world_size()
    is_trained = any(isinstance(unit, FAKE_QUANTIZES) for unit in units.values())
    in_parts = any(map(is_sharded, model.parameters()))
    is_one = world == 1 or not units or all(is_merged(unit, world) for unit in units.values())
    if world == 1 or (is_one and not in_parts):
        return
    structure = zlib.crc32("\n".join(model.state_dict()).encode())
    _CONVERTED[structure] += 1
    prefix = f"torchq_compat/convert/{structure}/{_CONVERTED[structure]}"
    own = str(_digest_of(model, units)).encode()
    try:
        others = _exchanged(prefix, own, waits=in_parts or not (is_trained or _ALONE.is_set()))
    except RuntimeError:  # A store that is gone, or that of a fake group: convert does without.
        return
    missing = sorted({*range(world)} - {rank, *others})
    if in_parts and missing:
        warn_user("TQ429", function=function, rank=rank, others=", ".join(map(str, missing)))
    differing = [other for other, number in others.items() if number != own]
    if is_one or (not differing and (is_trained or not missing)):
        return
    if differing:
        problem = f"the observers of rank {rank} differ from those of rank {', '.join(map(str, differing))}"
    else:
        problem = (
            f"rank {rank} converts with the ranges that it saw itself; the observers of {world} processes "
            "were not merged"
        )
    warn_user("TQ420", function=function, problem=problem)


def _exchanged(prefix: str, own: bytes, *, waits: bool) -> dict[int, bytes]:
    """Put the number of this rank into the store, and return those of the other ranks that are there."""
    store, rank = default_store(), dist.get_rank()
    store.set(f"{prefix}/{rank}", own)
    keys = {other: f"{prefix}/{other}" for other in range(dist.get_world_size()) if other != rank}
    if waits:
        try:
            store.wait(list(keys.values()), WAIT)
        except RuntimeError:  # the time is up
            _ALONE.set()
    return {other: store.get(key) for other, key in keys.items() if store.check([key])}


def _digest_of(model: nn.Module, units: Mapping[str, nn.Module]) -> int:
    values: dict[str, Any] = {
        f"{path}.{name}": value for path, unit in units.items() for name, value in state_of(unit).items()
    }
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    inside = tuple(f"{path}." for path in units)
    values |= {n: t for n, t in tensors.items() if not n.startswith(inside) and not is_sharded(t)}
    return digest(values)


@contextmanager
def whole_weights(model: nn.Module) -> Iterator[dict[int, Any]]:
    """Yield the memo with which ``copy.deepcopy`` copies ``model`` with whole parameters, gathered one by
    one, if ``fully_shard`` sharded it. Every rank of the mesh has to take part.

    Raises:
        ConvertError: there is no process group.
    """
    if not any(map(is_sharded, model.parameters())):
        yield {}
        return
    if not dist.is_initialized():
        raise ConvertError.of("TQ950.sharded_alone")
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
        yield whole


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
