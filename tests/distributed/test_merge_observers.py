"""Merging states: what one process over all the data would have, for each kind of observer and module."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import (
    FusedMovingAvgObsFakeQuantize,
    HistogramObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    PerChannelMinMaxObserver,
    QConfig,
    QConfigMapping,
    default_weight_observer,
    disable_observer,
    get_default_qat_qconfig_mapping,
    get_observer_state_dict,
)
from torch.ao.quantization import observer as legacy_observer

import torchq_compat as tc
from tests.helpers.once import made_once
from tests.helpers.oracle import MAP_LSTM, sqnr
from tests.helpers.user_modules import Custom, settings_for
from torchq_compat import quantize_eager
from torchq_compat.errors import ArgumentError, ConvertError, InputError, QuantizationWarning

WEIGHT = default_weight_observer


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, bidirectional=True)
        self.fc = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc(self.lstm(x)[0]).sigmoid()
        return result


def mapping_of(observer: Any) -> QConfigMapping:
    return QConfigMapping().set_global(QConfig(observer.with_args(dtype=torch.quint8), WEIGHT))


@made_once
def prepared_net(observer: Any) -> nn.Module:
    torch.manual_seed(0)
    return tc.prepare_fx(Net().eval(), mapping_of(observer), (torch.randn(3, 2, 4),), MAP_LSTM)


def shards(count: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        [torch.randn(4, 2, 4, generator=generator) * (shard + 1) for _ in range(4)] for shard in range(count)
    ]


def calibrated(prepared: nn.Module, batches: Sequence[Tensor]) -> nn.Module:
    fresh = copy.deepcopy(prepared)
    for batch in batches:
        fresh(batch)
    return fresh


def merged_of(prepared: nn.Module, parts: Sequence[Sequence[Tensor]]) -> nn.Module:
    fresh = copy.deepcopy(prepared)
    tc.merge_observers(fresh, states=[get_observer_state_dict(calibrated(prepared, part)) for part in parts])
    return fresh


def same_state(first: nn.Module, second: nn.Module) -> bool:
    theirs = second.state_dict()
    return all(torch.equal(value, theirs[name]) for name, value in first.state_dict().items())


def test_minima_and_maxima_are_those_of_one_process() -> None:
    prepared, parts = prepared_net(MinMaxObserver), shards(3)
    whole = calibrated(prepared, [batch for part in parts for batch in part])
    # A part without data, first and last, changes nothing.
    merged = merged_of(prepared, [[], *parts, []])
    assert same_state(merged, whole)
    assert not same_state(calibrated(prepared, parts[0]), whole)
    x = parts[2][0]
    ours, theirs = (tc.convert_fx(model)(x) for model in (merged, whole))
    assert torch.equal(ours, theirs)


def test_histograms_are_as_near_as_another_order_of_the_batches() -> None:
    prepared, parts = prepared_net(HistogramObserver), shards(3)
    whole = calibrated(prepared, [batch for part in parts for batch in part])
    reverse = calibrated(prepared, [batch for part in reversed(parts) for batch in part])
    merged, states = merged_of(prepared, [*parts, []]), whole.state_dict()
    other_order, moved, moved_by_order = reverse.state_dict(), [], []
    for name, value in merged.state_dict().items():
        if name.endswith("histogram"):
            assert float(value.sum()) == pytest.approx(float(states[name].sum()), rel=1e-5)
            # The mean distance by which values lie in other bins, in bins.
            shares = [m.cumsum(0) / m.sum() for m in (value, states[name], other_order[name])]
            moved.append(float((shares[0] - shares[1]).abs().sum()))
            moved_by_order.append(float((shares[2] - shares[1]).abs().sum()))
        elif name.endswith(("min_val", "max_val")):
            assert torch.equal(value, states[name]), name
    assert len(moved) >= 15
    assert max(moved) <= max(moved_by_order) < 20, (max(moved), max(moved_by_order))
    x = parts[2][0]
    by_whole, by_merged, by_reverse = (tc.convert_fx(model)(x) for model in (whole, merged, reverse))
    assert sqnr(by_whole, by_merged) > min(sqnr(by_whole, by_reverse), 60) - 3
    alone = tc.convert_fx(calibrated(prepared, parts[0]))(x)
    assert sqnr(by_whole, by_merged) > sqnr(by_whole, alone) + 6


def test_moving_averages_are_the_mean_of_the_parts_with_data() -> None:
    prepared, parts = prepared_net(MovingAverageMinMaxObserver), shards(2)
    states = [calibrated(prepared, part).state_dict() for part in parts]
    merged = merged_of(prepared, [parts[0], [], parts[1]]).state_dict()
    names = [name for name in merged if name.endswith("min_val") and states[0][name].isfinite().all()]
    assert len(names) > 10
    for name in names:
        assert torch.equal(merged[name], ((states[0][name].double() + states[1][name]) / 2).float())
        seen = name.replace("min_val", "seen")
        assert float(merged[seen]) == float(states[0][seen] + states[1][seen]) > 0


def test_equal_states_keep_their_bits() -> None:
    for observer in (MinMaxObserver, MovingAverageMinMaxObserver):
        prepared, part = prepared_net(observer), shards(1)[0]
        merged = merged_of(prepared, [part] * 3).state_dict()
        once = calibrated(prepared, part).state_dict()
        different = [n for n, v in merged.items() if not torch.equal(v, once[n])]
        assert all(name.endswith(("seen", "saturated")) for name in different)


def test_channels_are_merged_one_by_one() -> None:
    per_channel = PerChannelMinMaxObserver.with_args(dtype=torch.qint8, ch_axis=1)
    observer = tc.prepare_fx(
        nn.Sequential(nn.Linear(3, 3)).eval(),
        QConfigMapping().set_global(QConfig(MinMaxObserver, WEIGHT)),
        (torch.randn(2, 3),),
    )
    observer.activation_post_process_0 = per_channel()
    first, second = copy.deepcopy(observer), copy.deepcopy(observer)
    first.activation_post_process_0(torch.tensor([[-1.0, 2.0, 3.0]]))
    second.activation_post_process_0(torch.tensor([[4.0, -5.0, 1.0]]))
    tc.merge_observers(observer, states=[m.state_dict() for m in (observer, first, second)])
    assert observer.activation_post_process_0.min_val.tolist() == [-1, -5, 1]
    assert observer.activation_post_process_0.max_val.tolist() == [4, 2, 3]
    second.activation_post_process_0 = per_channel()
    second.activation_post_process_0(torch.randn(1, 2))
    before = observer.state_dict()
    with pytest.raises(ConvertError, match=r"activation_post_process_0.*other numbers of channels"):
        tc.merge_observers(observer, states=[m.state_dict() for m in (first, second)])
    assert all(torch.equal(value, before[name]) for name, value in observer.state_dict().items())


@made_once
def trained_net() -> nn.Module:
    torch.manual_seed(0)
    return tc.prepare_qat_fx(
        Net().train(), get_default_qat_qconfig_mapping("x86"), (torch.randn(3, 2, 4),), MAP_LSTM
    )


def test_fake_quantizes_compute_their_qparams_from_the_merged_range() -> None:
    prepared, parts = trained_net(), shards(2)
    models = [calibrated(prepared, part) for part in parts]
    merged = copy.deepcopy(prepared)
    tc.merge_observers(merged, states=[model.state_dict() for model in models])
    checked = 0
    for path, module in merged.named_modules():
        if not isinstance(module, FusedMovingAvgObsFakeQuantize):
            continue
        inner = module.activation_post_process
        lows = [m.get_submodule(path).activation_post_process.min_val.double() for m in models]
        assert torch.equal(inner.min_val, torch.stack(lows).mean(0).float())
        scale, zero_point = module.calculate_qparams()
        assert torch.equal(module.scale, scale)
        assert torch.equal(module.zero_point, zero_point.to(module.zero_point.dtype))
        checked += 1
    assert checked > 15
    merged.train()(parts[0][0]).sum().backward()
    models[1].apply(disable_observer)
    with pytest.raises(ConvertError, match=r"observer_enabled of .* is not the same"):
        tc.merge_observers(merged, states=[model.state_dict() for model in models])


class Doubling(MinMaxObserver):
    def forward(self, x: Tensor) -> Tensor:
        super().forward(2 * x)
        return x


class Counting(Doubling):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)

    def merge_observer_states(self, states: Sequence[dict[str, Tensor]]) -> None:
        self.calls.copy_(sum(state["calls"] for state in states))
        self.min_val.copy_(min(state["min_val"] for state in states))
        self.max_val.copy_(max(state["max_val"] for state in states))


class PowerOfTwo(MinMaxObserver):
    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        scale, zero_point = super().calculate_qparams()
        return 2 ** scale.log2().ceil(), zero_point


def linear_for_training() -> nn.Module:
    mapping = get_default_qat_qconfig_mapping("x86")
    return tc.prepare_qat_fx(nn.Sequential(nn.Linear(4, 3)).train(), mapping, (torch.randn(2, 4),))


def linear_with(observer: Any) -> nn.Module:
    torch.manual_seed(0)
    return tc.prepare_fx(nn.Sequential(nn.Linear(4, 3)).eval(), mapping_of(observer), (torch.randn(2, 4),))


def test_an_observer_that_a_user_wrote_merges_itself_or_is_refused_by_name() -> None:
    parts = [[torch.randn(2, 4)], [torch.randn(2, 4) * 3, torch.randn(2, 4)]]
    for observer in (Counting, PowerOfTwo):
        prepared = linear_with(observer)
        assert same_state(merged_of(prepared, parts), calibrated(prepared, [*parts[0], *parts[1]]))
    with pytest.raises(ConvertError, match=r"(?s)'activation_post_process_\d.*Doubling.*Hint: .*merge_obs"):
        merged_of(linear_with(Doubling), parts)


def test_an_observer_with_an_autograd_graph_is_merged() -> None:
    prepared = linear_with(Counting)
    whole = calibrated(prepared, [torch.randn(2, 4)])
    own = next(module for module in prepared.modules() if isinstance(module, Counting))
    own.calls = own.calls + torch.zeros((), requires_grad=True)
    with torch.no_grad():
        tc.merge_observers(prepared, states=[get_observer_state_dict(whole)])
    assert same_state(prepared, whole)


class ObservedCustom(nn.Module):
    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear, self.inner = linear, HistogramObserver()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(self.linear(x))
        return result

    @classmethod
    def from_float(cls, module: Any) -> ObservedCustom:
        return cls(module.linear)

    from_observed = from_float


def test_observers_inside_users_modules_and_standalone_modules() -> None:
    torch.manual_seed(0)
    settings, _ = settings_for(Custom, ObservedCustom, ObservedCustom)
    settings.set_standalone_module_name("2", None, (torch.randn(2, 3),), None, None)
    model = nn.Sequential(nn.Linear(4, 3), Custom(), nn.Sequential(nn.Linear(3, 3), nn.ReLU())).eval()
    prepared = tc.prepare_fx(model, mapping_of(MinMaxObserver), (torch.randn(2, 4),), settings)
    parts = [[torch.randn(8, 4)], [torch.randn(8, 4) * 3]]
    models = [calibrated(prepared, part) for part in parts]
    whole, merged = calibrated(prepared, [*parts[0], *parts[1]]), copy.deepcopy(prepared)
    tc.merge_observers(merged, states=[model.state_dict() for model in models])
    names = [name for name in merged.state_dict() if name.endswith("max_val")]
    assert any(name.startswith("1.inner") for name in names)
    assert any(name.startswith("2.") for name in names)
    for name in names:
        assert torch.equal(merged.state_dict()[name], whole.state_dict()[name]), name
    with pytest.raises(InputError, match=r"(?s)states\[0\] has no 1\.inner.*Hint: .*prepared.state_dict"):
        tc.merge_observers(merged, states=[get_observer_state_dict(model) for model in models])


def test_models_of_eager_mode() -> None:
    torch.manual_seed(0)
    model = quantize_eager.QuantWrapper(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))).eval()
    model.qconfig = QConfig(MinMaxObserver.with_args(dtype=torch.quint8), default_weight_observer)
    prepared = quantize_eager.prepare(model)
    parts = [[torch.randn(8, 4)], [torch.randn(8, 4) * 3]]
    whole, merged = calibrated(prepared, [*parts[0], *parts[1]]), merged_of(prepared, parts)
    assert same_state(merged, whole)
    ours, theirs = (quantize_eager.convert(each)(parts[1][0]) for each in (merged, whole))
    assert torch.equal(ours, theirs)


def test_states_that_no_observer_has_are_refused_by_name() -> None:
    """Each is refused with the state and the entry, and changes nothing."""
    prepared = linear_with(HistogramObserver)
    good, other = (get_observer_state_dict(calibrated(prepared, [torch.randn(2, 4)])) for _ in range(2))
    before, observer = copy.deepcopy(prepared.state_dict()), "activation_post_process_0"
    for name, value, problem in (
        ("min_val", torch.tensor(torch.nan), "holds NaN"),
        ("histogram", torch.full((2048,), torch.nan), "NaN or infinite"),
        ("min_val", torch.tensor(torch.inf), "is larger than"),
        ("max_val", torch.tensor(1j), "is torch.complex64"),
        ("loaded_scale", torch.tensor([1j]), "is torch.complex64"),
        ("max_val", torch.ones(2), "holds 2 numbers"),
        ("histogram", torch.ones(7), r"has the shape \(7,\), where the model has \(2048,\)"),
        ("histogram", torch.ones(2, 2048), r"has the shape \(2, 2048\)"),
        ("eps", torch.ones(3), r"has the shape \(3,\)"),
        ("min_val", 1.0, "must be a tensor, got float 1.0"),
    ):
        bad = {f"{observer}.loaded_zero_point": torch.tensor([0])} if name == "loaded_scale" else {}
        bad = {**other, **bad, f"{observer}.{name}": value}
        with pytest.raises(InputError, match=rf"(?s)states\[1\].*{observer}\.{name}.*{problem}.*Hint: "):
            tc.merge_observers(prepared, states=[good, bad])
        assert all(torch.equal(v, before[key]) for key, v in prepared.state_dict().items()), name
    with pytest.raises(InputError, match=rf"states\[0\] has no {observer}.loaded_zero_point"):
        tc.merge_observers(prepared, states=[{**good, f"{observer}.loaded_scale": torch.ones(1)}])


def test_moving_averages_that_lie_far_apart_are_told() -> None:
    narrow = torch.linspace(-1, 1, 8).reshape(2, 4)
    for make in (partial(linear_with, MovingAverageMinMaxObserver), linear_for_training):
        prepared = make()
        for shift, factor, is_told in (
            (0, 1, False),
            (0, 2, False),
            (0.5, 1, False),
            (0, 9, True),
            (9, 1, True),
        ):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                merged_of(prepared, [[narrow], [narrow * factor + shift]])
            told = [str(each.message) for each in caught if "TQ430" in str(each.message)]
            assert len(told) == is_told, (shift, factor)
            assert all("activation_post_process_0" in text and "Hint: " in text for text in told)
    with warnings.catch_warnings():
        warnings.simplefilter("error", QuantizationWarning)
        merged_of(linear_with(MinMaxObserver), [[narrow], [narrow * 9]])


def test_files_of_states(tmp_path: Path) -> None:
    prepared, parts = prepared_net(MinMaxObserver), shards(2)
    for position, part in enumerate(parts):
        torch.save(get_observer_state_dict(calibrated(prepared, part)), tmp_path / f"{position}.pt")
    merged = copy.deepcopy(prepared)
    tc.merge_observers(merged, states=[tmp_path / "0.pt", str(tmp_path / "1.pt")])
    assert same_state(merged, merged_of(prepared, parts))


def test_what_the_model_saw_itself_is_replaced_and_that_is_told() -> None:
    prepared, parts = linear_with(MinMaxObserver), [torch.randn(2, 4), torch.randn(2, 4)]
    state, own = get_observer_state_dict(calibrated(prepared, parts[:1])), calibrated(prepared, parts[1:])
    with pytest.warns(QuantizationWarning, match="was replaced by the states"):
        tc.merge_observers(own, states=[state])
    assert same_state(own, calibrated(prepared, parts[:1]))


def test_bad_input() -> None:
    prepared = linear_with(MinMaxObserver)
    merge = partial(tc.merge_observers, prepared)
    state = get_observer_state_dict(prepared)
    with pytest.raises(ArgumentError, match=r"(?s)no process group.*Hint: .*init_process_group.*states="):
        merge()
    for states in ([], state, "x.pt", 3):
        with pytest.raises(InputError, match="states has to be a list"):
            merge(states=states)
    with pytest.raises(InputError, match=r"states\[1\] is a int"):
        merge(states=[state, 3])
    with pytest.raises(InputError, match=r"states\[0\] cannot be read: FileNotFound"):
        merge(states=["nothing.pt"])
    with pytest.raises(InputError, match=r"states\[0\] is of another model: this one has no 'x.min_val'"):
        merge(states=[{**state, "x.min_val": torch.zeros(())}])
    with pytest.raises(InputError, match=r"states\[0\] has no activation_post_process_"):
        merge(states=[{}])
    for model in (nn.Linear(2, 2), tc.convert_fx(calibrated(prepared, [torch.randn(2, 4)]))):
        with pytest.raises(ConvertError, match="is not a prepared model"):
            tc.merge_observers(model, states=[state])


def test_legacy_observers_that_a_script_put_in() -> None:
    prepared = linear_with(MinMaxObserver)
    prepared.activation_post_process_0 = legacy_observer.HistogramObserver(bins=128)
    parts = [[torch.randn(50, 4)], [torch.randn(50, 4) * 2]]
    merged = merged_of(prepared, parts).activation_post_process_0
    whole = calibrated(prepared, [*parts[0], *parts[1]]).activation_post_process_0
    assert torch.equal(merged.max_val, whole.max_val)
    assert float(merged.histogram.sum()) == pytest.approx(400)
