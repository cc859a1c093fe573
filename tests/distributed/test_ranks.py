"""Two and four processes: one model whatever the ranks, and said where it is not one.

Written for CUDA too, by ``tests.helpers.processes.DEVICE``; untried there.
"""

from __future__ import annotations

import copy
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.ao.quantization import (
    HistogramObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    QConfig,
    QConfigMapping,
    default_weight_observer,
    get_default_qat_qconfig_mapping,
)
from torch.nn.parallel import DistributedDataParallel

import torchq_compat as tc
from tests.benchmarks.bench_processes import measure
from tests.helpers.once import made_once
from tests.helpers.processes import device, in_processes
from torchq_compat.errors import ArgumentError, ConvertError, QuantizationNote, QuantizationWarning


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(4, 6)
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc(self.rnn(x)[0])
        return result


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.fc = nn.Conv1d(4, 6, 3, padding=1), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc(self.bn(self.conv(x)).relu().mean(2))
        return result


def prepared_net(rank: int, observer: Any) -> nn.Module:
    return prepared_on(device(rank), observer)


@made_once
def prepared_on(where: torch.device, observer: Any) -> nn.Module:
    mapping = QConfigMapping().set_global(
        QConfig(observer.with_args(dtype=torch.quint8), default_weight_observer)
    )
    custom = tc.get_default_prepare_custom_config()
    return tc.prepare_fx(Net().eval().to(where), mapping, (torch.randn(3, 2, 4, device=where),), custom)


def shard(rank: int) -> list[Tensor]:
    """Return two batches, each rank's wider; the last of four ranks has none."""
    generator = torch.Generator().manual_seed(rank)
    scale, count = 2.0**rank, 0 if rank == 3 else 2
    return [(torch.randn(3, 2, 4, generator=generator) * scale).to(device(rank)) for _ in range(count)]


def converted_state(prepared: nn.Module) -> dict[str, Any]:
    return on_cpu(tc.convert_to_reference_fx(prepared).state_dict())


def on_cpu(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in state.items()}


def converted_and_run(prepared: nn.Module, x: Tensor) -> tuple[dict[str, Any], Tensor]:
    """Return the state of the q-dq graph and what the lowered model computes."""
    lowered: Any = tc.convert_fx(prepared)
    return on_cpu(lowered.reference.state_dict()), lowered(x).cpu()


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(value, second[name]) if isinstance(value, Tensor) else value == second[name]
        for name, value in first.items()
    )


def calibrate_on_shards(rank: int, ranks: int, histogram: bool) -> dict[str, Any]:
    observer = HistogramObserver if histogram else MinMaxObserver
    fresh = prepared_net(rank, observer)
    prepared, whole = copy.deepcopy(fresh), copy.deepcopy(fresh)
    for batch in shard(rank):
        prepared(batch)
    for other in range(ranks):
        for batch in shard(other):
            whole(batch.to(device(rank)))
    with warnings.catch_warnings(record=True) as before:
        warnings.simplefilter("always")
        alone = converted_state(prepared)
    tc.merge_observers(prepared)
    x = shard(2)[0].to(device(rank))
    with warnings.catch_warnings():
        warnings.simplefilter("error", QuantizationWarning)
        merged, output = converted_and_run(prepared, x)
        state = copy.deepcopy(prepared.state_dict())
        tc.merge_observers(prepared)
        again = prepared.state_dict()
    of_whole, output_of_whole = converted_and_run(whole, x)
    return {
        "merged": merged,
        "alone": alone,
        "whole": of_whole,
        "told": [str(told.message) for told in before if "merge_observers" in str(told.message)],
        "once": all(torch.equal(value, again[name]) for name, value in state.items()),
        "outputs": [output, output_of_whole],
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_calibration_on_shards_is_that_of_one_process(ranks: int, tmp_path: Path) -> None:
    results = in_processes(calibrate_on_shards, ranks, tmp_path, False)
    for rank, result in enumerate(results):
        assert same(result["merged"], result["whole"])
        assert same(result["merged"], results[0]["merged"])
        assert result["once"], "merging again changes nothing"
        assert torch.equal(*result["outputs"])
        (told,) = result["told"]
        assert "Hint: call torchq_compat.merge_observers(prepared)" in told
        assert f"rank {rank} " in told
    assert not same(results[0]["alone"], results[0]["whole"])


def test_histograms_are_equal_on_all_ranks(tmp_path: Path) -> None:
    results = in_processes(calibrate_on_shards, 2, tmp_path, True)
    assert same(results[0]["merged"], results[1]["merged"])
    ours, whole = results[0]["outputs"]
    assert torch.equal(ours, results[1]["outputs"][0])
    assert float((ours - whole).abs().max()) < 0.1 * float(whole.abs().max())
    assert not torch.equal(ours, torch.zeros_like(ours))


def merge_again(rank: int, ranks: int) -> dict[str, Any]:
    """Merge over a part of the ranks, then over all, then convert a wrapper without a process group."""
    prepared = prepared_net(rank, MinMaxObserver)
    prepared(shard(rank % 3)[0])
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    tc.merge_observers(prepared, group=groups[rank // 2])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        converted_state(prepared)
        tc.merge_observers(prepared)
    whole = prepared_net(rank, MinMaxObserver)
    for other in range(3):
        whole(shard(other)[0])
    wrapped = DistributedDataParallel(prepared)
    dist.destroy_process_group()
    states = converted_state(wrapped), converted_state(whole)
    return {"told": " ".join(str(warning.message) for warning in caught), "same": same(*states)}


def test_groups_are_merged_and_then_all(tmp_path: Path) -> None:
    for result in in_processes(merge_again, 4, tmp_path):
        assert "differ from those of rank" in result["told"]
        assert "were merged before" in result["told"]
        assert result["same"]


class Unmergeable(MinMaxObserver):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0)


class MergedOnRankZero(MinMaxObserver):
    def merge_observer_states(self, states: list[dict[str, Tensor]]) -> None:
        self.min_val.copy_(states[1]["min_val"])
        if dist.get_rank():
            raise LookupError("no disk here")


class Resized(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(count))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x * self.table.sum()
        return result


def refusals(rank: int, ranks: int) -> dict[str, Any]:
    caught: dict[str, Any] = {}

    def attempt(name: str, prepared: nn.Module, group: Any = None) -> None:
        before = copy.deepcopy(prepared.state_dict())
        try:
            tc.merge_observers(prepared, group=group)
        except (ArgumentError, ConvertError) as error:
            caught[name] = str(error)
        after = prepared.state_dict()
        assert all(torch.equal(value, after[key]) for key, value in before.items()), name

    prepared = prepared_net(rank, MinMaxObserver)
    attempt("other model", prepared if rank else prepared_net(rank, HistogramObserver))
    attempt("one is none", prepared if rank else nn.Linear(2, 2))
    attempt("user's", prepared_net(rank, Unmergeable))
    half_merged = prepared_net(rank, MergedOnRankZero)
    half_merged(shard(rank)[0])
    attempt("on rank 1", half_merged)
    mapping = QConfigMapping().set_global(QConfig(MinMaxObserver, default_weight_observer))
    attempt("buffer", tc.prepare_fx(Resized(3 + rank).eval(), mapping, (torch.randn(2, 3),)))
    attempt("settings", prepared_net(rank, MinMaxObserver.with_args(quant_min=0, quant_max=127 * (1 + rank))))
    attempt("not a group", prepared, "all")
    unsent = prepared_net(rank, MinMaxObserver)
    if rank:
        vars(unsent.get_submodule("activation_post_process_0"))["tensor_val"] = threading.Lock()
    attempt("state", unsent)
    group = dist.new_group([1])
    attempt("group", prepared, group if rank == 0 else None) if rank == 0 else None
    with torch.no_grad():
        next(prepared.parameters()).add_(rank)
    attempt("weights", prepared)
    return caught


def test_what_cannot_be_merged_is_refused_on_every_rank(tmp_path: Path) -> None:
    for caught in in_processes(refusals, 2, tmp_path):
        assert "ranks 0 and 1 have different models" in caught["other model"]
        assert "rank 0: merge_observers: this Linear is not a prepared model" in caught["one is none"]
        assert "Unmergeable" in caught["user's"]
        assert "def merge_observer_states" in caught["user's"]
        assert "rank 1: merge_observers: the observer at 'activation_post_process_" in caught["on rank 1"]
        assert "cannot be merged: LookupError: no disk here" in caught["on rank 1"]
        assert "have different models: table ((3,), torch.float32)" in caught["buffer"]
        assert "the parameters of the ranks differ" in caught["weights"]
        assert "quant_max=127" in caught["settings"]
        assert "group must be a process group, got str 'all'" in caught["not a group"]
        assert "rank 1: merge_observers: the state of the observers cannot be read" in caught["state"]
        assert "is not a member" in caught.get("group", "is not a member")


def far_apart(rank: int, ranks: int) -> tuple[list[str], str]:
    """Merge moving averages of data that differ ninefold, and histograms of which one has too few bins."""
    averages, histograms = (
        prepared_net(rank, each) for each in (MovingAverageMinMaxObserver, HistogramObserver)
    )
    for prepared in (averages, histograms):
        prepared(shard(0)[0] * (1 + 8 * rank))
    if rank:
        histograms.get_buffer("activation_post_process_0.histogram").resize_(7)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tc.merge_observers(averages)
    before = copy.deepcopy(histograms.state_dict())
    with pytest.raises(ConvertError) as raised:
        tc.merge_observers(histograms)
    assert all(torch.equal(value, before[name]) for name, value in histograms.state_dict().items())
    return [str(told.message) for told in caught if "TQ430" in str(told.message)], str(raised.value)


def test_averages_that_lie_far_apart_are_told_and_states_of_other_shapes_refused(tmp_path: Path) -> None:
    for told, refused in in_processes(far_apart, 2, tmp_path):
        assert len(told) == 1
        assert "their mean is not what one process would have" in told[0]
        assert "observer at 'activation_post_process_0' cannot be merged: RuntimeError" in refused


def rank_zero_converts_alone(rank: int, ranks: int) -> list[str]:
    prepared = prepared_net(rank, MinMaxObserver)
    prepared(shard(rank)[0])
    if rank:
        return []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tc.convert_fx(prepared)
    return [str(told.message) for told in caught if "merge_observers" in str(told.message)]


def test_rank_zero_may_convert_alone_and_is_told(tmp_path: Path) -> None:
    (told,), nothing = in_processes(rank_zero_converts_alone, 2, tmp_path)
    assert "the observers of 2 processes were not merged" in told
    assert nothing == []


def prepared_for_training(make: type[nn.Module], rank: int) -> nn.Module:
    return trainable_on(device(rank), make)


@made_once
def trainable_on(where: torch.device, make: type[nn.Module]) -> nn.Module:
    example = torch.randn((3, 2, 4) if make is Net else (2, 4, 5), device=where)
    mapping = get_default_qat_qconfig_mapping("x86")
    custom = tc.get_default_prepare_custom_config()
    return tc.prepare_qat_fx(make().train().to(where), mapping, (example,), custom)


def train_with_ddp(rank: int, ranks: int) -> dict[str, Any]:
    """Train on the same batches on every rank, two accumulated ones a step, beside one process."""
    prepared = prepared_for_training(Net, rank)
    alone = copy.deepcopy(prepared)
    wrapped = DistributedDataParallel(prepared)
    losses: list[list[float]] = [[], []]
    generator = torch.Generator().manual_seed(5)
    first, second = (torch.randn(3, 2, 4, generator=generator).to(device(rank)) for _ in range(2))
    for position, model in enumerate((wrapped, alone)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            if model is wrapped:
                with wrapped.no_sync():
                    model(first).square().mean().backward()
            else:
                model(first).square().mean().backward()
            loss = model(second).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[position].append(float(loss))
    converted = converted_state(wrapped)
    return {"losses": losses, "same": same(converted, converted_state(alone)), "converted": converted}


@pytest.mark.parametrize("ranks", [2, 4])
def test_training_with_ddp_has_the_losses_of_one_process(ranks: int, tmp_path: Path) -> None:
    results = in_processes(train_with_ddp, ranks, tmp_path)
    for result in results:
        ours, alone = result["losses"]
        assert ours == pytest.approx(alone, rel=1e-6)
        assert ours[0] > ours[-1] > 0
        assert same(result["converted"], results[0]["converted"])
        assert result["same"]


def uneven_ranks(rank: int, ranks: int) -> dict[str, Any]:
    """Train on shards of other sizes; each rank's last batch leaves it with its own batch norms."""
    prepared = prepared_for_training(Norms, rank)
    wrapped = DistributedDataParallel(prepared)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    with wrapped.join():
        for _ in range(3 + rank):
            x = torch.randn(4, 4, 5, generator=generator).to(device(rank)) * (rank + 1)
            wrapped(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    prepared(torch.randn(4, 4, 5, generator=generator).to(device(rank)))
    before = copy.deepcopy(prepared.state_dict())
    tc.merge_observers(wrapped)
    with warnings.catch_warnings():
        warnings.simplefilter("error", QuantizationWarning)
        warnings.simplefilter("ignore", QuantizationNote)  # of what was trained
        return {"converted": converted_state(wrapped), "before": before, "after": prepared.state_dict()}


def test_ranks_with_other_numbers_of_batches_convert_to_one_model(tmp_path: Path) -> None:
    first, second = in_processes(uneven_ranks, 2, tmp_path)
    assert same(first["converted"], second["converted"])
    assert same(first["after"], second["after"])
    name = next(name for name in first["after"] if name.endswith("running_mean"))
    assert torch.equal(first["after"][name], first["before"][name])
    assert not torch.equal(second["before"][name], first["before"][name])


def test_the_benchmark_measures_both() -> None:
    row = measure(2, 2)
    assert row["ratio"] == pytest.approx(row["several"] / row["one"])
    assert 0 < row["merge"] < row["several"]
