"""What convert does first under a process group: it unwraps, waits for the ranks that share the weights, and
says when the ranks differ."""

import zlib
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from threading import Event
from typing import Any

import torch.distributed as dist
from torch import nn

from torchq_compat.errors import ConvertError
from torchq_compat.model.graph_module import Stage, record_of
from torchq_compat.quantize.distributed.merge_observers import digest, is_merged, observers_of
from torchq_compat.quantize.distributed.merge_rules import state_of
from torchq_compat.quantize.distributed.wrappers import unwrapped
from torchq_compat.read.qspecs import FAKE_QUANTIZES
from torchq_compat.support.sharded import is_sharded, sharing_ranks
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
        ConvertError: a wrapper has only parts of its weights, or a rank with other parts does not convert.
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
    only if it has to tell something else, that nothing was merged, or if they have parts of the weights.

    Raises:
        ConvertError: a rank with parts of the weights did not convert in the time of the process group.
    """
    if not dist.is_available() or not dist.is_initialized() or default_store() is None:
        return  # None: that of MPI
    units, rank, world = observers_of(model), dist.get_rank(), dist.get_world_size()
    is_trained = any(isinstance(unit, FAKE_QUANTIZES) for unit in units.values())
    sharing = sharing_ranks(model)
    is_one = world == 1 or not units or all(is_merged(unit, world) for unit in units.values())
    if world == 1 or (is_one and not sharing):
        return
    structure = zlib.crc32("\n".join(model.state_dict()).encode())
    _CONVERTED[structure] += 1
    prefix = f"torchq_compat/convert/{structure}/{_CONVERTED[structure]}"
    own = str(_digest_of(model, units)).encode()
    try:
        others = _exchanged(prefix, own, waits=bool(sharing) or not (is_trained or _ALONE.is_set()))
    except RuntimeError:  # A store that is gone, or that of a fake group: convert does without.
        return
    if late := sorted(sharing - {rank, *others}):
        _wait_for(late, prefix, structure, function)
    missing = {*range(world)} - {rank, *others, *late}
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


def _wait_for(late: list[int], prefix: str, structure: int, function: str) -> None:
    """Wait for the numbers of ranks without which the weights cannot be gathered."""
    store, rank, others = default_store(), dist.get_rank(), ", ".join(map(str, late))
    warn_user("TQ429", function=function, rank=rank, others=others)
    try:
        store.wait([f"{prefix}/{other}" for other in late])
    except RuntimeError as cause:
        _CONVERTED[structure] -= 1  # They meet this rank when it converts again, and not where it gave up.
        with suppress(RuntimeError):
            store.delete_key(f"{prefix}/{rank}")
        seconds = round(store.timeout.total_seconds())
        raise ConvertError.of(
            "TQ950.sharded_not_all", function=function, rank=rank, others=others, seconds=seconds
        ) from cause


def _digest_of(model: nn.Module, units: Mapping[str, nn.Module]) -> int:
    values: dict[str, Any] = {
        f"{path}.{name}": value for path, unit in units.items() for name, value in state_of(unit).items()
    }
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    inside = tuple(f"{path}." for path in units)
    values |= {n: t for n, t in tensors.items() if not n.startswith(inside) and not is_sharded(t)}
    return digest(values)
