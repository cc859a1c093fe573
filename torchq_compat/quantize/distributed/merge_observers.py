"""Merge what the observers of several processes saw: ``merge_observers``."""

import os
import pickle
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import GraphModule

from torchq_compat.annotate.observed_graph import observed_places
from torchq_compat.errors import ArgumentError, CheckpointError, ConvertError, InputError, TorchQCompatError
from torchq_compat.model.graph_module import Stage, record_of
from torchq_compat.model.state import check_state
from torchq_compat.modules.user_modules import OpaqueUserModule
from torchq_compat.quantize.distributed import merge_rules
from torchq_compat.quantize.distributed.wrappers import unwrapped
from torchq_compat.read.torch_ao_classes import is_of_torch_ao
from torchq_compat.support.argument_checks import checked_arguments, shown
from torchq_compat.support.graph_nodes import copied_model
from torchq_compat.support.sharded import is_sharded
from torchq_compat.support.upstream import BatchNormBase, is_activation_post_process
from torchq_compat.support.user_warnings import warn_user

#: The attribute of an observer with the digest of its merged state, and the number of ranks merged.
MERGED = "merged_digest"
SETTINGS = ("dtype", "qscheme", "quant_min", "quant_max", "ch_axis", "averaging_constant", "bins")


@checked_arguments()
def merge_observers(
    prepared: nn.Module,
    *,
    group: dist.ProcessGroup | None = None,
    states: Sequence[Mapping[str, Any] | str | os.PathLike[str]] | None = None,
) -> None:
    """Give ``prepared`` the observers that one process would have over the data of all processes.

    Call it on every rank after calibration or training, before convert_fx, which then returns the same model
    on all ranks. Minima, maxima and counts are exact; histograms are rebinned as between two batches; a
    moving average becomes the mean over the ranks that saw data, from which a fake-quantize computes its
    qparams. Ranks without data count nothing. Buffers outside observers, such as those of batch norm, become
    those of the group's first rank, as DistributedDataParallel sends them.

    A class of yours with state of its own is merged by a method ``merge_observer_states(self, states)``: it
    gets its ``state_dict()`` of every rank, in order, and sets its own state.

    Legacy: FX has no such function; each process converts with the ranges that it saw itself.

    Args:
        prepared: what ``prepare_fx``, ``prepare_qat_fx`` or a ``prepare`` of ``quantize_eager`` returned, or
            its DistributedDataParallel wrapper; changed in place.
        group: the process group, by default all processes. Every rank of it has to call this function.
        states: instead of a process group, the states of observers that were calibrated elsewhere: what
            ``torch.ao.quantization.get_observer_state_dict`` or ``state_dict`` returned for models that were
            prepared alike, or paths of files with it. They replace what ``prepared`` has observed itself.

    Raises:
        ArgumentError: there is no process group, this rank is not in it, or both it and ``states`` are given.
        InputError: a state is not one of this model, is empty, or has values that no observer has, as NaN.
        ConvertError: the ranks prepared different models or have other parameters, the model is not a
            prepared one, or an observer has no rule. No rank is changed then.

    Example:
        >>> import torch
        >>> from torch.ao.quantization import get_default_qconfig_mapping, get_observer_state_dict
        >>> from torchq_compat import merge_observers, prepare_fx
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(4, 2)).eval(), torch.randn(3, 4)
        >>> states = []
        >>> for shard in (torch.randn(50, 4), torch.randn(50, 4)):  # two jobs
        ...     prepared = prepare_fx(model, get_default_qconfig_mapping("x86"), (x,))
        ...     _ = prepared(shard)
        ...     states.append(get_observer_state_dict(prepared))
        >>> merge_observers(prepared, states=states)
    """
    if states is not None:
        if group is not None:
            raise ArgumentError.of("TQ903.group_and_states")
        _merge_given(_prepared_model(prepared), states)
        return
    _check_group(group)
    _merge_ranks(prepared, group)


def observers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the observers and fake-quantizes of ``model`` by path, and modules that merge themselves; those
    inside another one are part of it."""
    units: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        is_observer = is_activation_post_process(module) or is_of_torch_ao(module)
        inside = any(path.startswith(f"{outer}.") for outer in units)
        if (is_observer or hasattr(type(module), merge_rules.METHOD)) and not inside:
            units[path] = module
    return units


def _settings_of(unit: nn.Module) -> str:
    """Return the classes of ``unit`` and what their constructors were given, which the ranks have alike."""
    named = (
        [f"{name}={value}" for name in SETTINGS if (value := getattr(part, name, None)) is not None]
        for part in unit.modules()
    )
    return f"{type(unit).__qualname__}: {'; '.join(', '.join(item) for item in named)}"


def digest(values: Mapping[str, Any]) -> int:
    """Return a checksum of ``values``, with the bits of its tensors."""
    total = 0
    for name in sorted(values):
        value = values[name]
        total = zlib.crc32(name.encode(), total)
        if isinstance(value, Tensor):
            plain = value.detach().cpu().contiguous()
            total = zlib.crc32(str((tuple(plain.shape), plain.dtype)).encode(), total)
            total = zlib.crc32(plain.reshape(-1).view(torch.uint8).numpy().tobytes(), total)
        elif name.rpartition(".")[2] not in merge_rules.ATTRIBUTES:
            total = zlib.crc32(repr(value).encode(), total)
    return total


def is_merged(module: nn.Module, ranks: int) -> bool:
    """Return whether ``module`` was merged over ``ranks`` ranks, and has observed nothing since."""
    return vars(module).get(MERGED) == (digest(merge_rules.state_of(module)), ranks)


def _prepared_model(prepared: Any) -> nn.Module:
    model = unwrapped(prepared, "merge_observers")
    record = record_of(model)
    is_eager = record is None and isinstance(model, nn.Module) and observers_of(model)
    if not is_eager and (record is None or record.stage is not Stage.PREPARED):
        raise ConvertError.of("TQ950.merge_not_prepared", model=model)
    prepared_model: nn.Module = model
    return prepared_model


def _check_group(group: dist.ProcessGroup | None) -> None:
    if not dist.is_available() or not dist.is_initialized():
        raise ArgumentError.of("TQ903.no_group")
    outside: Any = dist.GroupMember.NON_GROUP_MEMBER
    if group is not None and group != outside and not isinstance(group, dist.ProcessGroup):
        raise ArgumentError.of("TQ903.group_type", group=shown(group))
    if dist.get_rank(group) < 0:
        raise ArgumentError.of("TQ903.not_a_member")


def _merge_ranks(prepared: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Gather, merge copies on each rank by itself, and the observers only once all ranks could."""
    ranks = dist.get_world_size(group)
    (units, tensors), received = _on_all_ranks(partial(_report, prepared, ranks), group)
    planned = partial(_planned, prepared, units, received)
    (states, differing, again), _ = _on_all_ranks(planned, group)
    _merge(units, states)
    for path in states:
        vars(units[path])[MERGED] = (digest(merge_rules.state_of(units[path])), ranks)
    if differing:
        _send_from_first(tensors, differing, group)
    if again:
        warn_user("TQ421", count=len(again), observer=again[0])


def _on_all_ranks(
    make: Callable[[], tuple[Any, Any]], group: dist.ProcessGroup | None
) -> tuple[Any, list[Any]]:
    """Return the first result of ``make``, and the second one of each rank. A rank that fails says so in the
    gathered value, or the other ranks would wait for it.

    Raises:
        ConvertError: a rank failed.
    """
    own, sent = None, None
    try:
        own, sent = make()
    except TorchQCompatError as error:
        sent = error
    except Exception as error:  # A user's observer may fail, or keep what cannot be sent.
        sent = ConvertError.of("TQ950.unsendable_state", error=error, method=merge_rules.METHOD)
    received: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(received, sent, group=group)
    for rank, other in enumerate(received):
        if isinstance(other, TorchQCompatError):
            raise ConvertError.of("TQ950.on_rank", rank=rank, message=other.message, hint=other.hint)
    return own, received


def _report(prepared: nn.Module, ranks: int) -> tuple[Any, bytes]:
    """Return the observers and the tensors outside of them, and what the other ranks need to know of both."""
    model = _prepared_model(prepared)
    units = observers_of(model)
    # What is sharded is the same model anyway.
    inside = tuple(f"{path}." for path in units)
    both: Iterator[tuple[str, Tensor]] = iter([*model.named_parameters(), *model.named_buffers()])
    tensors = {name: t for name, t in both if not name.startswith(inside) and not is_sharded(t)}
    report = (
        {path: _settings_of(unit) for path, unit in units.items()}
        | {name: f"{tuple(tensor.shape)}, {tensor.dtype}" for name, tensor in tensors.items()},
        {
            path: (merge_rules.state_of(unit), is_merged(unit, ranks), vars(unit).get(MERGED))
            for path, unit in units.items()
        },
        {name: digest({name: tensor}) for name, tensor in tensors.items()},
    )
    return (units, tensors), pickle.dumps(report)


def _planned(prepared: nn.Module, units: Mapping[str, nn.Module], received: Sequence[bytes]) -> Any:
    """Return the states to merge, the tensors that differ and the observers merged before, which this rank
    has found to be mergeable, and nothing to send."""
    reports = [pickle.loads(item) for item in received]
    _check_same_model(reports)
    _, first, digests = reports[0]
    differing = [name for name in digests if len({other[name] for _, _, other in reports}) > 1]
    _check_may_differ(_prepared_model(prepared), differing)
    unchanged = {
        path
        for path in units
        if all(report[1][path][1] and report[1][path][2] == first[path][2] for report in reports)
    }
    again = [path for path in units if path not in unchanged and any(r[1][path][2] for r in reports)]
    states = {path: [report[1][path][0] for report in reports] for path in units if path not in unchanged}
    _check_mergeable(units, states)
    return (states, differing, again), None


def _check_same_model(reports: Sequence[Any]) -> None:
    for rank, (classes, _, digests) in enumerate(reports):
        first_classes, _, first_digests = reports[0]
        other = sorted({*classes.items()} ^ {*first_classes.items()}) or sorted({*digests} ^ {*first_digests})
        if other:
            path, *settings = other[0] if isinstance(other[0], tuple) else (other[0],)
            what = f"{path} ({settings[0]})" if settings else path
            raise ConvertError.of("TQ950.other_models", rank=rank, what=what)


def _check_may_differ(model: nn.Module, names: Sequence[str]) -> None:
    if parameters := [name for name in names if name in dict(model.named_parameters())]:
        raise ConvertError.of("TQ950.other_parameters", parameters=", ".join(parameters[:3]))
    users = [path for path, module in model.named_modules() if isinstance(module, OpaqueUserModule)]
    for name in names:
        owner = model.get_submodule(name.rpartition(".")[0])
        if any(name.startswith(f"{path}.") for path in users) and not isinstance(owner, BatchNormBase):
            raise ConvertError.of(
                "TQ950.other_buffers", name=name, kind=type(owner).__qualname__, method=merge_rules.METHOD
            )


def _send_from_first(
    tensors: Mapping[str, Tensor], names: Sequence[str], group: dist.ProcessGroup | None
) -> None:
    sent: list[Any] = [{name: tensors[name].detach().cpu() for name in names}]
    source = dist.get_global_rank(group, 0) if group is not None else 0
    dist.broadcast_object_list(sent, src=source, group=group)
    with torch.no_grad():
        for name, value in sent[0].items():
            tensors[name].copy_(value)


def _check_mergeable(
    units: Mapping[str, nn.Module], states: Mapping[str, Sequence[merge_rules.State]]
) -> None:
    """Merge copies: an observer that fails leaves all of them as they were."""
    for path, own in states.items():
        try:
            merge_rules.merge_states(copied_model(units[path]), own, path)
        except TorchQCompatError:
            raise
        except Exception as cause:
            raise ConvertError.of("TQ950.failed_merge", path=path, cause=cause) from cause


def _merge(units: Mapping[str, nn.Module], states: Mapping[str, Sequence[merge_rules.State]]) -> None:
    for path, own in states.items():
        merge_rules.merge_states(units[path], own, path)
    if far := [path for path, own in states.items() if merge_rules.lie_far_apart(units[path], own)]:
        warn_user("TQ430", count=len(far), observer=far[0])


def _merge_given(model: nn.Module, given: Any) -> None:
    if isinstance(given, (Mapping, str, os.PathLike)) or not isinstance(given, Sequence) or not given:
        raise InputError.of("TQ901.no_states")
    units = observers_of(model)
    own = {path: merge_rules.state_of(unit) for path, unit in units.items()}
    names = {*model.state_dict(), *(f"{path}.{name}" for path in units for name in merge_rules.LOADED)}
    read = [_read(state, position, names, model) for position, state in enumerate(given)]
    states = {
        path: [_state_at(path, unit, state, position) for position, state in enumerate(read)]
        for path, unit in units.items()
    }
    before = [
        path
        for path, state in own.items()
        if any(name.endswith("min_val") for name in state)
        and merge_rules.has_seen(state)
        and digest(state) not in {digest(other) for other in states[path]}
        and not _is_of_weight(model, path)
    ]
    _check_mergeable(units, states)
    _merge(units, states)
    for unit in units.values():
        vars(unit).pop(MERGED, None)
    if before:
        warn_user("TQ422", count=len(before), observer=before[0])


def _is_of_weight(model: nn.Module, path: str) -> bool:
    """Return whether the observer at ``path`` of the graph observes a weight."""
    parent, _, name = path.rpartition(".")
    owner = model.get_submodule(parent)
    return isinstance(owner, GraphModule) and any(
        place.target == name and place.is_weight for place in observed_places(owner)
    )


def _read(given: Any, position: int, names: set[str], model: nn.Module) -> Mapping[str, Any]:
    if isinstance(given, (str, os.PathLike)):
        try:
            given = torch.load(Path(given), map_location="cpu", weights_only=True)
        except Exception as cause:
            raise InputError.of("TQ901.unreadable_state", position=position, cause=cause) from cause
    if not isinstance(given, Mapping):
        raise InputError.of("TQ901.no_state_dict", position=position, given=given)
    if unknown := [str(name) for name in given if name not in names]:
        raise InputError.of("TQ901.other_state", position=position, unknown=unknown)
    try:
        return check_state({n: value for n, value in given.items() if not is_sharded(value)}, model)
    except CheckpointError as cause:
        raise InputError.of("TQ901.bad_state", position=position, message=cause.message) from cause


def _state_at(path: str, unit: nn.Module, state: Mapping[str, Any], position: int) -> merge_rules.State:
    result = {
        name.removeprefix(f"{path}."): value.detach().cpu() if isinstance(value, Tensor) else value
        for name, value in state.items()
        if name.startswith(f"{path}.")
    }
    own = {n: v for n, v in unit.state_dict().items() if n.rpartition(".")[2] not in merge_rules.LOADED}
    loaded = () if result.keys().isdisjoint(merge_rules.LOADED) else merge_rules.LOADED
    for name in (*own, *loaded):
        if name not in result:
            raise InputError.of("TQ901.state_lacks", position=position, path=path, name=name)
    for name, value in result.items():
        if merge_rules.has_other_shape(unit, name, value, own.get(name)):
            shapes = f"{tuple(value.shape)}, where the model has {tuple(own[name].shape)}"
            message = f"{path}.{name} has the shape {shapes}"
            raise InputError.of("TQ901.bad_state", position=position, message=message)
    return result
