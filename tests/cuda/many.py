"""Process groups on the device: nccl with one rank, and two ranks that share the device over gloo."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import torchq_compat as tc
from tests.cuda.devices import calibrate, prepared_on, run
from tests.cuda.table import case
from tests.cuda.uses import prepared_qat, train
from tests.helpers.oracle import sqnr


@contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    """Make a process group of this process, with the device's own backend."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=dist.FileStore(f"{folder}/store", 1),
            rank=0,
            world_size=1,
        )
        try:
            yield
        finally:
            dist.destroy_process_group()


@case("merge_observers, one rank")
def _(device: torch.device) -> str:
    with one_rank(device):
        prepared, _, batches = prepared_on(device, "conv and LSTM")
        calibrate(prepared, batches, device)
        before = copy.deepcopy(prepared.state_dict())
        tc.merge_observers(prepared)
        after = prepared.state_dict()
        changed = [k for k, v in before.items() if isinstance(v, Tensor) and not torch.equal(v, after[k])]
        moved = [k for k, v in before.items() if isinstance(v, Tensor) and v.device != after[k].device]
        assert not changed, changed
        assert not moved, moved
    return f"{len(before)} values as before"


@case("merge_observers over nccl alone, one rank")
def _(device: torch.device) -> str:
    if device.type != "cuda":
        return "of CUDA only"
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1)
        try:
            prepared, _, batches = prepared_on(device, "convolutions")
            tc.merge_observers(calibrate(prepared, batches, device))
            here = run(tc.convert_fx(prepared), batches[0], device)
            return f"{sqnr(run(prepared, batches[0], device), here):.0f} dB"
        finally:
            dist.destroy_process_group()


@case("merge_observers of states from the device and from the CPU")
def _(device: torch.device) -> str:
    cpu, states = torch.device("cpu"), []
    for place, part in ((device, slice(0, 2)), (cpu, slice(2, 4))):
        prepared, _, batches = prepared_on(place, "convolutions")
        calibrate(prepared, batches[part], place)
        states.append(prepared.state_dict())
    whole, _, batches = prepared_on(device, "convolutions")
    calibrate(whole, batches, device)
    merged, _, _ = prepared_on(device, "convolutions")
    tc.merge_observers(merged, states=states)
    here = run(tc.convert_to_reference_fx(merged), batches[0], device)
    return f"{sqnr(run(tc.convert_to_reference_fx(whole), batches[0], device), here):.0f} dB of one process"


@case("DistributedDataParallel, one rank")
def _(device: torch.device) -> str:
    said = []
    with one_rank(device):
        for name in ("convolutions", "GRU"):
            prepared, batches = prepared_qat(device, name)
            alone = train(copy.deepcopy(prepared), batches, device)
            wrapped = DistributedDataParallel(prepared)
            losses = train(wrapped, batches, device)
            tc.merge_observers(wrapped)
            converted = tc.convert_fx(wrapped.module.eval().cpu())
            run(converted, batches[0], torch.device("cpu"))
            said.append(f"{name} losses differ by {abs(losses[-1] - alone[-1]):.1e}")
    return "; ".join(said)


def _sharded(dtype: torch.dtype | None, device: torch.device) -> str:
    said = []
    with one_rank(device):
        # As in FX, parts of recurrent modules, and weights over the variance of a batch norm, stay float32.
        for name in ("embeddings", *(["GRU", "convolutions"] if dtype is None else [])):
            prepared, batches = prepared_qat(device, name)
            alone = train(copy.deepcopy(prepared), batches, device)
            sharded: Any = fully_shard(prepared, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
            losses = train(sharded, batches, device)
            sharded.eval()
            here = run(tc.convert_to_reference_fx(sharded), batches[0], device)
            assert here.isfinite().all()
            tc.convert_fx(sharded)
            said.append(f"{name}: losses differ by {abs(losses[-1] - alone[-1]):.1e}")
    return "; ".join(said)


for _dtype in (None, torch.bfloat16):
    case(f"fully_shard, one rank, parameters as {_dtype or torch.float32}")(partial(_sharded, _dtype))


def _calibrate_on_one_device(rank: int, ranks: int, place: str) -> dict[str, Any]:
    device = torch.device(place)
    prepared, _, batches = prepared_on(device, "conv and LSTM")
    calibrate(prepared, batches[rank::ranks], device)
    tc.merge_observers(prepared)
    whole, _, _ = prepared_on(device, "conv and LSTM")
    calibrate(whole, batches, device)
    outputs = [run(tc.convert_to_reference_fx(each), batches[0], device) for each in (prepared, whole)]
    trained, batches = prepared_qat(device, "convolutions")
    # nccl wants a device for each rank.
    wrapped: nn.Module = DistributedDataParallel(trained, process_group=dist.new_group(backend="gloo"))
    losses = train(wrapped, batches, device)
    tc.merge_observers(wrapped)
    trained.eval()
    return {
        "outputs": outputs,
        "losses": losses,
        "trained": run(tc.convert_to_reference_fx(trained), batches[0], device),
    }


@case("two ranks on one device over gloo: calibration and DDP")
def _(device: torch.device) -> str:
    from tests.helpers.processes import in_processes

    with tempfile.TemporaryDirectory() as folder:
        results = in_processes(_calibrate_on_one_device, 2, Path(folder), str(device))
    first, second = results
    assert torch.equal(first["outputs"][0], second["outputs"][0])
    assert torch.equal(first["trained"], second["trained"])
    noise = sqnr(first["outputs"][1], first["outputs"][0])
    return f"equal; {noise:.0f} dB of one process; losses {first['losses']}"
