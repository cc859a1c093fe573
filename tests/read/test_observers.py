"""torch.ao's observers and users' own, as torchao observers that PT2E understands."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.quantization as legacy
import torch.ao.quantization.quantize_fx as fx
import torchao.quantization.pt2e.observer as pt2e_observer
from torch import Tensor, nn
from torch.ao.quantization import QConfig, QConfigMapping
from torchao.quantization.pt2e import FakeQuantizeBase, ObserverBase

import torchq_compat as tc
from tests.helpers.histograms import searched_in_arrays
from tests.helpers.oracle import activation_qparams, by_fx, by_us, fx_activation_qparams, quantize_nodes, sqnr
from torchq_compat import quantize_fx
from torchq_compat.errors import ConfigError, InputError, QuantizationWarning
from torchq_compat.read.observer_classes import searched_qparams
from torchq_compat.read.observers import ObserverConstructor

CONSTRUCTORS = {
    "min-max": legacy.MinMaxObserver,
    "min-max symmetric": legacy.MinMaxObserver.with_args(
        dtype=torch.qint8, qscheme=torch.per_tensor_symmetric
    ),
    "min-max reduced": legacy.MinMaxObserver.with_args(reduce_range=True),
    "min-max own range": legacy.MinMaxObserver.with_args(quant_min=0, quant_max=100),
    "min-max own eps": legacy.MinMaxObserver.with_args(eps=2**-4),
    "moving average": legacy.MovingAverageMinMaxObserver.with_args(averaging_constant=0.3),
    "per channel": legacy.PerChannelMinMaxObserver.with_args(ch_axis=1, dtype=torch.qint8),
    "moving average per channel": legacy.MovingAveragePerChannelMinMaxObserver.with_args(ch_axis=0),
    "float qparams": legacy.default_float_qparams_observer,
    "histogram": legacy.HistogramObserver.with_args(reduce_range=True),
    "fixed": legacy.FixedQParamsObserver.with_args(scale=0.1, zero_point=7),
    "x86 activation": legacy.get_default_qconfig("x86").activation,
    "x86 weight": legacy.get_default_qconfig("x86").weight,
    "qat activation": legacy.get_default_qat_qconfig("x86").activation,
    "fake quantize": legacy.FakeQuantize.with_args(
        observer=legacy.MovingAverageMinMaxObserver, quant_min=0, quant_max=255
    ),
}


@pytest.mark.parametrize("legacy_constructor", CONSTRUCTORS.values(), ids=CONSTRUCTORS)
@pytest.mark.filterwarnings("ignore")
def test_equal_qparams_bit_for_bit(legacy_constructor: Any) -> None:
    torch.manual_seed(0)
    theirs, ours = legacy_constructor(), ObserverConstructor(legacy_constructor)()
    assert isinstance(ours, (ObserverBase, FakeQuantizeBase))
    for step in range(4):
        batch = torch.randn(6, 5) * (1 + step) + 0.3
        theirs(batch.clone())
        ours(batch.clone())
    for expected, found in zip(theirs.calculate_qparams(), ours.calculate_qparams(), strict=True):
        assert torch.equal(expected.float(), found.float())
    assert {torch.quint8: torch.uint8, torch.qint8: torch.int8}[theirs.dtype] is ours.dtype


#: Batches that cover every branch of an observer: growing, inside the range, equal ends, one value, infinite,
#: empty, of every magnitude.
STREAM = (
    *(torch.linspace(-1, 2, 30) * factor for factor in (0.5, 1.0, 0.9, 0.3, 1.0)),
    torch.full((4,), 0.25),
    torch.tensor([float("inf"), 0.1, -0.7]),
    torch.zeros(0),
    torch.linspace(-4, 1, 500),
    torch.tensor([1 / 3, 0.2, 0.3], dtype=torch.float64),
    *(torch.randn(40, generator=torch.Generator().manual_seed(seed)) for seed in range(20)),
    *(torch.linspace(-0.7, 1.1, 5) * 10.0**exponent for exponent in range(-44, 36, 3)),
)


@pytest.mark.parametrize("name", ["HistogramObserver", "MinMaxObserver", "MovingAverageMinMaxObserver"])
@pytest.mark.filterwarnings("ignore")
def test_the_state_of_a_faster_observer_is_torchaos_after_every_batch(name: str) -> None:
    theirs = getattr(pt2e_observer, name)()
    ours = ObserverConstructor(getattr(legacy, name))()
    assert type(ours) is not type(theirs)
    # torchao's histogram refuses NaN.
    poison = () if name == "HistogramObserver" else (torch.tensor([0.1, float("nan")]),)
    for batch in (*STREAM, *STREAM, *poison, *STREAM):
        theirs(batch)
        assert ours(batch) is batch
        found = ours.state_dict()
        for key, expected in theirs.state_dict().items():
            torch.testing.assert_close(found[key], expected, rtol=0, atol=0, equal_nan=True)
    assert ours.min_val.isnan() == bool(poison)


@pytest.mark.filterwarnings("ignore")
def test_saturated_values_are_counted_as_they_pass() -> None:
    observer = ObserverConstructor(legacy.MovingAverageMinMaxObserver)()
    seen = saturated = 0
    # An observer that saw infinity cannot be converted.
    for batch in (batch for batch in STREAM if bool(batch.isfinite().all())):
        observer(batch)
        outside = (batch < observer.min_val) | (batch > observer.max_val)
        seen, saturated = seen + batch.numel(), saturated + int(outside.sum())
        assert (float(observer.seen), float(observer.saturated)) == (seen, saturated)
    assert 0 < saturated < seen


SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "long tail": torch.exp,
    "outliers": lambda x: x.pow(9),
    "gate": torch.sigmoid,
    "saturated": lambda x: (4 * x).clamp(-1, 1),
    "one value": lambda x: torch.zeros_like(x) + 0.3,
    "two values": torch.sign,
}


@pytest.mark.parametrize("count", [3, 100, 20_000])
@pytest.mark.parametrize("bins", [64, 2048])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.filterwarnings("ignore")
def test_a_histogram_is_cut_where_torch_ao_cuts_it(
    shape: Callable[[Tensor], Tensor], bins: int, count: int
) -> None:
    torch.manual_seed(count)
    constructor = legacy.HistogramObserver.with_args(bins=bins)
    theirs, ours = constructor(), ObserverConstructor(constructor)()
    search = theirs._non_linear_param_search
    # Its qparams search again.
    vars(theirs)["_non_linear_param_search"] = functools.cache(searched_in_arrays()(search))
    for _ in range(3):
        batch = shape(torch.randn(count))
        theirs(batch)
        ours(batch)
    for expected, found in zip(
        theirs._non_linear_param_search(), ours._non_linear_param_search(), strict=True
    ):
        assert torch.equal(expected, found)
    if (bins, count) == (64, 3):
        assert search() == theirs._non_linear_param_search()
    qparams = theirs.calculate_qparams(), ours.calculate_qparams(), searched_qparams(theirs)
    for expected, found, searched in zip(*qparams, strict=True):
        assert torch.equal(expected.float(), found.float())
        assert torch.equal(expected, searched)


@pytest.mark.filterwarnings("ignore")
def test_any_histogram_is_cut_where_torch_ao_cuts_it() -> None:
    """Also those that no batch has made: as states are loaded, and rounded counts of grown ranges."""
    generator = torch.Generator().manual_seed(1)
    bins = 100
    shares, places = torch.rand(4, bins, generator=generator), torch.arange(bins)
    histograms = [
        *shares * torch.tensor([1e-38, 1e-3, 1.0, 1e33])[:, None],
        *(shares > 0.9).float() * 1e5 + shares.round(),
        *torch.exp(-places * shares[:, :1] * 0.2) * 1000,
        *(torch.where(places == place, 1e6, shares[2]) for place in (0, 40, 99)),
        torch.ones(bins),
        torch.zeros(bins),
    ]
    ends = [(-1.0, 6.0), (-1e-40, 1e-40), (-1e30, 0.0), (1.5, 1.5), (0.0, 1e-6)]
    constructor = legacy.HistogramObserver.with_args(bins=bins)
    theirs, ours = constructor(), ObserverConstructor(constructor)()
    cuts = set()
    with searched_in_arrays():
        for (low, high), histogram in zip(itertools.cycle(ends), histograms):
            for observer in (theirs, ours):
                observer.histogram.copy_(histogram)
                observer.min_val.fill_(low)
                observer.max_val.fill_(high)
            cut = theirs._non_linear_param_search()
            for expected, found in zip(cut, ours._non_linear_param_search(), strict=True):
                assert torch.equal(expected, found)
            cuts.add((float(cut[0]), float(cut[1])))
    assert len(cuts) > 10


def test_a_fused_fake_quantize_has_the_qparams_it_trains_with() -> None:
    """Its observer, which torch.ao converts with, has other qparams: symmetric scales up to 0.4% apart."""
    constructor = legacy.get_default_qat_qconfig("x86").weight
    torch.manual_seed(0)
    theirs, ours = constructor(), ObserverConstructor(constructor)()
    weight = torch.randn(6, 5) + 0.3
    weight[2].abs_()
    theirs(weight.clone())
    ours(weight.clone())
    scale, zero_point = ours.calculate_qparams()
    observed, _ = theirs.calculate_qparams()
    # A channel with values of one sign trains with a zero point of its own, which is not symmetric.
    symmetric = theirs.zero_point == 0
    assert 0 < int(symmetric.sum()) < 6
    assert torch.equal(zero_point, torch.zeros(6))
    assert torch.equal(scale[symmetric], theirs.scale[symmetric])
    assert torch.equal(scale[~symmetric], observed[~symmetric])
    torch.testing.assert_close(scale, observed, rtol=0.004, atol=0)
    assert not torch.equal(scale, observed)


class PercentileObserver(legacy.MinMaxObserver):
    """An observer of the user's own that discards outliers."""

    def forward(self, x_orig: Tensor) -> Tensor:
        low, high = torch.quantile(x_orig.detach(), torch.tensor([0.02, 0.98]))
        super().forward(x_orig.detach().clamp(low, high))
        return x_orig


class ScaledFakeQuantize(legacy.FakeQuantize):
    """An observer of the user's own that counts its calls."""

    calls = 0

    def forward(self, X: Tensor) -> Tensor:  # noqa: N803
        type(self).calls += 1
        return super().forward(X)


def test_a_users_own_observer_observes() -> None:
    torch.manual_seed(0)
    mapping = QConfigMapping().set_global(QConfig(PercentileObserver, legacy.default_weight_observer))
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    data = [(torch.randn(64, 16),) for _ in range(3)]
    _, ours = by_us(model, mapping, data)
    _, theirs = by_fx(model, mapping, data)
    assert len(quantize_nodes(ours)) == 3
    assert activation_qparams(ours) == fx_activation_qparams(theirs)
    plain = by_us(
        model,
        QConfigMapping().set_global(QConfig(legacy.MinMaxObserver, legacy.default_weight_observer)),
        data,
    )
    assert activation_qparams(ours) != activation_qparams(plain[1])
    assert 15 < sqnr(model(data[0][0]), ours(data[0][0])) < 60


def test_a_users_own_fake_quantize_trains_and_converts() -> None:
    torch.manual_seed(0)
    activation = ScaledFakeQuantize.with_args(observer=legacy.MovingAverageMinMaxObserver)
    mapping = QConfigMapping().set_global(QConfig(activation, legacy.default_weight_fake_quant))
    model = nn.Sequential(nn.Linear(8, 8)).train()
    prepared = tc.prepare_qat_fx(model, mapping, (torch.randn(4, 8),))
    ScaledFakeQuantize.calls = 0
    for _ in range(3):
        prepared(torch.randn(32, 8)).sum().backward()
    assert ScaledFakeQuantize.calls == 6
    prepared.apply(legacy.disable_observer).eval()
    x = torch.randn(32, 8)
    assert sqnr(prepared(x).detach(), tc.convert_fx(prepared)(x).detach()) > 30


@pytest.mark.parametrize(
    "constructor",
    [
        legacy.FakeQuantize.with_args(observer=legacy.MovingAverageMinMaxObserver),
        legacy.get_default_qat_qconfig("x86").activation,
        legacy.HistogramObserver,
        legacy.default_weight_observer,
        legacy.get_default_qconfig("x86").weight,
        legacy.default_fixed_qparams_range_0to1_fake_quant,
    ],
)
def test_the_classes_of_torch_ao_find_what_stands_for_theirs(constructor: Any) -> None:
    """Scripts and toolkits test ``isinstance(module, torch.ao.quantization.FakeQuantize)``."""
    theirs, ours = constructor(), ObserverConstructor(constructor)()
    classes = (
        legacy.FakeQuantize,
        legacy.FusedMovingAvgObsFakeQuantize,
        legacy.FixedQParamsFakeQuantize,
        legacy.HistogramObserver,
        legacy.MinMaxObserver,
        legacy.PerChannelMinMaxObserver,
        legacy.MovingAverageMinMaxObserver,
        legacy.PlaceholderObserver,
    )
    expected = [cls.__name__ for cls in classes if isinstance(theirs, cls)]
    assert expected
    assert [cls.__name__ for cls in classes if isinstance(ours, cls)] == expected


def test_fixed_qparams_of_32_bits_keep_the_range_of_the_dtype() -> None:
    """A FixedQParamsObserver has the range 0..255 for every dtype, which PT2E would clamp to."""
    made = ObserverConstructor(
        legacy.FixedQParamsObserver.with_args(scale=2**-11, zero_point=2**15, dtype=torch.qint32)
    )()
    assert (made.quant_min, made.quant_max) == (-(2**31), 2**31 - 1)


@pytest.mark.parametrize("bad", ["minmax", lambda: torch.zeros(1), nn.ReLU])
def test_what_is_no_constructor_is_refused(bad: Any) -> None:
    mapping = QConfigMapping().set_global(QConfig(bad, legacy.default_weight_observer))
    with pytest.raises(
        ConfigError, match=r"qconfig\.activation is not an observer or fake-quantize constructor"
    ):
        tc.prepare_fx(nn.Sequential(nn.Linear(2, 2)).eval(), mapping, (torch.randn(1, 2),))


@pytest.mark.parametrize("name", [n for n in quantize_fx.__all__ if hasattr(fx, n)])
def test_entry_points_take_the_legacy_arguments(name: str) -> None:
    theirs = list(inspect.signature(getattr(fx, name)).parameters.values())
    ours = list(inspect.signature(getattr(tc, name)).parameters.values())
    assert [p.name for p in ours[: len(theirs)]] == [p.name for p in theirs]
    assert all(p.kind is p.KEYWORD_ONLY for p in ours[len(theirs) :])


def test_what_fuse_fx_fused_prepare_takes() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    with pytest.raises(InputError, match="training mode"):
        tc.fuse_fx(model.train())
    model.eval()
    mapping = legacy.get_default_qconfig_mapping("qnnpack")
    _, converted = by_us(tc.fuse_fx(model), mapping, [(torch.randn(2, 3, 8, 8),)])
    targets = [n.target for n in converted.graph.nodes]
    assert torch.ops.aten.batch_norm.default not in targets
    assert len(quantize_nodes(converted)) == 2


def test_default_custom_configs_quantize_an_lstm() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LSTM(8, 8)).eval()
    prepared = tc.prepare_fx(
        model,
        legacy.get_default_qconfig_mapping("qnnpack"),
        (torch.randn(4, 2, 8),),
        tc.get_default_prepare_custom_config(),
    )
    prepared(torch.randn(9, 4, 8))
    converted = tc.convert_fx(prepared, tc.get_default_convert_custom_config())
    x = torch.randn(9, 4, 8)
    assert 25 < sqnr(model(x)[0], converted(x)[0]) < 60
    assert isinstance(converted.get_submodule("0"), torch.ao.nn.quantized.LSTM)


@pytest.mark.parametrize("engine", ["x86", "qnnpack"])
def test_fake_quantizes_in_calibration_leave_the_weights_float_as_fx_does(engine: str) -> None:
    """prepare_fx with a mapping for training: FX fake-quantizes activations, but no weights of layers."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 6, 1),
        nn.Flatten(),
        nn.Linear(96, 4),
    ).eval()
    batches = [(torch.randn(4, 3, 6, 6),) for _ in range(3)]
    mapping = legacy.get_default_qat_qconfig_mapping(engine)
    with pytest.warns(QuantizationWarning, match="which are for training"):
        prepared, converted = by_us(model, mapping, batches)
    ours = sorted(activation_qparams(converted))
    theirs = sorted(fx_activation_qparams(by_fx(model, mapping, batches)[1]))
    assert [zero_point for _, zero_point in ours] == [zero_point for _, zero_point in theirs]
    assert [scale for scale, _ in ours] == pytest.approx([scale for scale, _ in theirs], rel=1e-4)
    assert len(ours) == 5
    # With rounded weights ranges would differ by half a percent; models in training have rounded weights.
    fakes = [m for m in prepared.modules() if isinstance(m, FakeQuantizeBase)]
    assert sorted(int(m.fake_quant_enabled) for m in fakes) == [0] * 3 + [1] * 5
    trained = tc.prepare_qat_fx(model.train(), mapping, batches[0])
    assert all(int(m.fake_quant_enabled) for m in trained.modules() if isinstance(m, FakeQuantizeBase))


PER_CHANNEL = {
    "qscheme": torch.per_channel_symmetric,
    "dtype": torch.qint8,
    "quant_min": -128,
    "quant_max": 127,
}
FUSED_OF_WEIGHTS = {
    "per channel": {"observer": legacy.MovingAveragePerChannelMinMaxObserver, "ch_axis": 0, **PER_CHANNEL},
    "per tensor": {"observer": legacy.MovingAverageMinMaxObserver, "quant_min": 0, "quant_max": 255},
}


@pytest.mark.parametrize("settings", FUSED_OF_WEIGHTS.values(), ids=FUSED_OF_WEIGHTS)
def test_a_weight_is_observed_by_its_extremes(settings: dict[str, Any], subtests: pytest.Subtests) -> None:
    torch.manual_seed(0)
    make = ObserverConstructor(legacy.FusedMovingAvgObsFakeQuantize.with_args(**settings))
    for size in ((6, 5, 3, 3), (6, 5)):
        ones = (1,) * (len(size) - 2)
        for factor in (None, torch.randn(6, 1, *ones), torch.randn(1, 5, *ones)):
            called, observed = make(), make()
            with subtests.test(size=size, factor=None if factor is None else tuple(factor.shape)):
                for step in range(3):
                    weight = torch.randn(size) * (1 + step) + 0.3
                    called((weight if factor is None else weight * factor).clone())
                    observed.observe(weight, factor)
                    pairs = zip(called.calculate_qparams(), observed.calculate_qparams(), strict=True)
                    assert all(torch.equal(*pair) for pair in pairs)
