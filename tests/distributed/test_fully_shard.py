"""FSDP2: prepared models train sharded, convert and go through distributed checkpoints."""

from __future__ import annotations

import copy
import operator
import warnings
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.ao.quantization import get_default_qat_qconfig_mapping, get_default_qconfig_mapping
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import torchq_compat as tc
from tests.distributed.test_ranks import (
    Net,
    converted_and_run,
    converted_state,
    on_cpu,
    prepared_for_training,
    same,
)
from tests.helpers.processes import device, in_processes
from torchq_compat.errors import ConvertError, TorchQCompatError
from torchq_compat.quantize.distributed import ranks as ranks_module
from torchq_compat.support.sharded import converting_together, whole


def sharded(prepared: nn.Module, **settings: Any) -> Any:
    for path, module in prepared.named_modules():
        if path == "rnn":
            fully_shard(module, **settings)
    return fully_shard(prepared, **settings)


def batches(rank: int, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(3, 2, 4, generator=generator).to(device(rank)) for _ in range(count)]


def train(model: Any, data: list[torch.Tensor]) -> list[float]:
    """Train with a step after each two batches; several ranks exchange gradients with the second only."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for position, x in enumerate(data):
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(bool(position % 2))
        model.require_backward_grad_sync = bool(position % 2)  # of DistributedDataParallel
        loss = model(x).float().square().mean()
        loss.backward()
        losses.append(float(loss))
        if position % 2:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def train_with_fsdp(rank: int, ranks: int) -> dict[str, Any]:
    prepared = prepared_for_training(Net, rank)
    alone = copy.deepcopy(prepared)
    model = sharded(prepared)
    data = batches(rank, 2) * 2
    losses = train(model, data), train(alone, data)
    parts = [isinstance(parameter, DTensor) for parameter in model.parameters()]
    converted, output = converted_and_run(model, data[0])
    return {
        "losses": losses,
        "sharded": all(parts) and len(parts) > 0,
        "converted": converted,
        "still sharded": all(isinstance(parameter, DTensor) for parameter in model.parameters()),
        "outputs": [output, tc.convert_fx(alone)(data[0]).cpu()],
        "trains on": train(model, data[:2]),
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_training_sharded_has_the_losses_of_one_process(ranks: int, tmp_path: Path) -> None:
    results = in_processes(train_with_fsdp, ranks, tmp_path)
    for result in results:
        assert result["sharded"]
        assert result["still sharded"]
        ours, alone = result["losses"]
        assert ours == pytest.approx(alone, rel=1e-5)
        assert ours[0] > ours[-2] > 0
        assert result["trains on"][0] < ours[0]
        assert same(result["converted"], results[0]["converted"])
        ours, alone = result["outputs"]
        assert float((ours - alone).abs().max()) <= 1.1 * float(alone.abs().max()) / 64
        assert float(alone.abs().max()) > 0


def mixed_precision(rank: int, ranks: int) -> list[float]:
    prepared = prepared_for_training(Net, rank)
    model = sharded(prepared, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
    return train(model, batches(rank, 2) * 2)


def test_gradients_are_reduced_in_bfloat16(tmp_path: Path) -> None:
    first, second = in_processes(mixed_precision, 2, tmp_path)
    assert first == second
    assert first[0] > first[2] > 0


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms, self.lstm = Normed(), nn.LSTM(4, 4)
        self.encoder = nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.lstm(self.encoder(self.norms(x.mT).mT))[0]
        return result


def train_beside_ddp(rank: int, ranks: int, kind: type[nn.Module], parts: list[list[str]]) -> dict[str, Any]:
    """Train, evaluate, train and convert what ``fully_shard`` shards, ``parts`` first, and what DDP holds."""
    torch.manual_seed(0)
    x = torch.randn(5, 4, 4, device=device(rank)) * (rank + 1)
    mapping, custom = get_default_qat_qconfig_mapping("x86"), tc.get_default_prepare_custom_config()
    prepared = tc.prepare_qat_fx(kind().train().to(device(rank)), mapping, (x,), custom)
    ddp = DistributedDataParallel(copy.deepcopy(prepared), broadcast_buffers=False)
    for paths in parts:
        modules = [prepared.get_submodule(path) for path in paths]
        fully_shard(modules if len(modules) > 1 else modules[0])
    result: dict[str, Any] = {}
    for name, model in (("ours", fully_shard(prepared)), ("ddp", ddp)):
        losses = train(model.train(), [x, x])
        with torch.no_grad():
            output = model.eval()(x).cpu()
        tc.merge_observers(model)
        converted = converted_state(model)  # with what the call in evaluation left gathered
        result[name] = (losses + train(model.train(), [x, x]), output, converted)
    return result


def check_beside_ddp(results: list[dict[str, Any]]) -> None:
    for result in results:
        (losses, output, converted), (ddp_losses, ddp_output, ddp_converted) = result["ours"], result["ddp"]
        assert losses == ddp_losses
        assert losses[-1] != losses[1]
        assert torch.equal(output, ddp_output)
        assert same(converted, ddp_converted)


def test_batch_norms_change_their_mode_in_a_sharded_model(tmp_path: Path) -> None:
    check_beside_ddp(in_processes(train_beside_ddp, 2, tmp_path, Normed, []))


def test_parts_may_be_sharded_before_the_whole(tmp_path: Path) -> None:
    parts = [["norms.0"], ["encoder.linear1"], ["norms"], ["encoder", "lstm"]]
    check_beside_ddp(in_processes(train_beside_ddp, 2, tmp_path, Blocks, parts))


def refusals(rank: int, ranks: int) -> list[str]:
    x = batches(rank, 1)
    mapping = get_default_qat_qconfig_mapping("x86")
    in_parts = prepared_for_training(Net, rank)
    fully_shard(in_parts.get_submodule("fc"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    half = fully_shard(prepared_for_training(Normed, rank), mp_policy=policy)
    calls: list[Callable[[], Any]] = [
        lambda: tc.convert_fx(
            FullyShardedDataParallel(prepared_for_training(Net, rank), device_id=device(rank))
        ),
        lambda: in_parts(x[0]),
        lambda: half(torch.randn(2, 4, 5, device=device(rank))),
        lambda: tc.prepare_qat_fx(fully_shard(Net().train()), mapping, (x[0],)),
        lambda: tc.prepare_qat_fx(DistributedDataParallel(Net().train()), mapping, (x[0],)),
    ]
    caught = []
    for call in calls:
        with pytest.raises(TorchQCompatError) as raised:
            call()
        caught.append(str(raised.value))
    return caught


def test_what_holds_or_shards_a_model_in_a_way_that_cannot_work_is_refused(tmp_path: Path) -> None:
    for old, part, half, sharded, wrapped in in_processes(refusals, 2, tmp_path):
        assert "convert_fx: FullyShardedDataParallel holds the model" in old
        assert "Hint: train with torch.distributed.fsdp.fully_shard(prepared)" in old
        assert "Hint: shard the whole model too, fully_shard(prepared)" in part
        assert "for bfloat16 use torch.autocast, no MixedPrecisionPolicy(param_dtype=...)" in half
        assert "the model to prepare is sharded" in sharded
        assert "the model to prepare is a DistributedDataParallel" in wrapped


def gathered(seen: list[int]) -> Any:
    """Return what notes, in ``seen``, how many gathered elements there are at a time."""
    full_tensor, alive = DTensor.full_tensor, [0]

    def gather(part: DTensor) -> torch.Tensor:
        whole = full_tensor(part)
        count = whole.numel()
        alive[0] += count
        weakref.finalize(whole.untyped_storage(), lambda: operator.setitem(alive, 0, alive[0] - count))
        seen.append(alive[0])
        return whole

    return mock.patch.object(DTensor, "full_tensor", gather)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4))
        self.layers = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(3)))
        self.standalone = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
        self.lstm = nn.LSTM(16, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.lstm(self.standalone(self.layers(self.norms(x))))[0]
        return result


def convert_in_parts(rank: int, ranks: int, is_qat: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    x = torch.randn(3, 4, 16, device=device(rank))
    custom = tc.get_default_prepare_custom_config()
    custom.set_standalone_module_name("standalone", None, (x,), None, None)
    prepare, mapping = (
        (tc.prepare_qat_fx, get_default_qat_qconfig_mapping("x86"))
        if is_qat
        else (tc.prepare_fx, get_default_qconfig_mapping("x86"))
    )
    prepared = prepare(Deep().train(is_qat).to(device(rank)), mapping, (x,), custom)
    prepared(x)
    alone = copy.deepcopy(prepared)
    for path in ("layers.2", "standalone.1", "standalone", "norms") if is_qat else ():
        fully_shard(prepared.get_submodule(path))
    model: Any = fully_shard(prepared)
    seen: list[int] = []
    with gathered(seen):
        ours = converted_state(model)
    caught = []
    with torch.no_grad():
        for buffer in model.buffers() if rank else ():
            if buffer.is_floating_point():
                buffer.fill_(torch.nan)
    with pytest.raises(TorchQCompatError) as raised:
        tc.convert_fx(model)
    caught.append(str(raised.value))
    with pytest.raises(TorchQCompatError) as raised, converting_together(model):
        whole(next(model.parameters()), f"of {rank}")
    caught.append(str(raised.value))
    return {"seen": seen, "same": same(ours, converted_state(alone)), "caught": caught}


@pytest.mark.parametrize("is_qat", [False, True])
def test_convert_gathers_one_module_at_a_time(is_qat: bool, tmp_path: Path) -> None:
    results = in_processes(convert_in_parts, 2, tmp_path, is_qat)
    for result in results:
        assert result["same"]
        # The LSTM has 320, a linear layer 256; gloo may hold one more for a moment. In all 1,600.
        assert 256 <= max(result["seen"]) <= 640
        assert "the ranks do not gather the same weights" in result["caught"][1]
    assert "rank 1 failed" in results[0]["caught"][0]
    assert "NaN" in results[1]["caught"][0]


def convert_one_after_the_other(rank: int, ranks: int) -> tuple[list[str], Any]:
    ranks_module.WAIT = timedelta(seconds=0.1)
    model = sharded(prepared_for_training(Net, rank))
    tc.merge_observers(model)
    store, warn_user = ranks_module.default_store(), ranks_module.warn_user

    def warn_and_note(code: str, **places: object) -> None:
        warn_user(code, **places)
        store.set("told", code)

    ranks_module.warn_user = warn_and_note
    given_up = ""
    if rank:
        store.wait(["given up"])
        store.wait(["told"])
    else:
        timeout = store.timeout
        store.set_timeout(timedelta(seconds=0.1))
        with pytest.raises(ConvertError) as raised:
            tc.convert_fx(model)
        given_up = str(raised.value)
        store.set_timeout(timeout)
        store.delete_key("told")
        store.set("given up", "")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        converted = tc.convert_fx(model)
    told = [str(each.message) for each in caught if "TQ429" in str(each.message)]
    return [given_up, *told], converted(batches(rank, 1)[0]).cpu()


def test_a_rank_that_converts_first_says_what_it_waits_for(tmp_path: Path) -> None:
    (told, one), (nothing, other) = in_processes(convert_one_after_the_other, 2, tmp_path)
    given_up, waits = told
    assert "rank 1 did not convert within 0 s of rank 0" in given_up
    assert "rank 0 waits for rank 1 to convert too" in waits
    assert nothing == [""]
    assert torch.equal(one, other)


def save(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    prepared = prepared_for_training(Net, rank)
    model = sharded(prepared)
    train(model, batches(rank, 2))
    dcp.save(get_model_state_dict(model), checkpoint_id=f"{folder}/prepared")
    converted = tc.convert_to_reference_fx(model)
    dcp.save(get_model_state_dict(converted), checkpoint_id=f"{folder}/converted")
    return {"converted": on_cpu(converted.state_dict()), "outputs": converted(batches(rank, 1)[0]).cpu()}


def load(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    """Load into a model that saw data, sharded over other ranks: shapes of observers are there then."""
    prepared = prepared_for_training(Net, rank)
    prepared(batches(rank, 1)[0])
    model = sharded(prepared) if ranks > 2 else DistributedDataParallel(prepared).module
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=f"{folder}/prepared")
    set_model_state_dict(model, state)
    converted = tc.convert_to_reference_fx(model)
    other = tc.convert_to_reference_fx(prepared_with_one_batch(rank))
    target = get_model_state_dict(other)
    dcp.load(target, checkpoint_id=f"{folder}/converted")
    set_model_state_dict(other, target)
    x = batches(rank, 1)[0]
    return {
        "converted": on_cpu(converted.state_dict()),
        "outputs": [m(x).cpu() for m in (converted, other)],
    }


def prepared_with_one_batch(rank: int) -> nn.Module:
    prepared = prepared_for_training(Net, rank)
    prepared(batches(rank, 1)[0] * 2)
    return prepared


@pytest.mark.parametrize(("saving", "loading"), [(2, 4), (4, 2)])
def test_distributed_checkpoints(saving: int, loading: int, tmp_path: Path) -> None:
    (tmp_path / "save").mkdir()
    (tmp_path / "load").mkdir()
    saved = in_processes(save, saving, tmp_path / "save", str(tmp_path))[0]
    for result in in_processes(load, loading, tmp_path / "load", str(tmp_path)):
        assert same(result["converted"], saved["converted"])
        for output in result["outputs"]:
            assert torch.equal(output, saved["outputs"])
