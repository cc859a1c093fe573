"""Settings that were ignored or misread: fixed qparams, functionals, contradictory ranges, half precision in
front of integers, complex backend patterns, names that match nothing. The oracle is live FX where it runs."""

from __future__ import annotations

import operator
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.nn.intrinsic as nni
import torch.ao.nn.quantized.reference as nnqr
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.nn.quantized import FloatFunctional, FXFloatFunctional
from torch.ao.quantization import (
    FixedQParamsFakeQuantize,
    FixedQParamsObserver,
    HistogramObserver,
    MinMaxObserver,
    PerChannelMinMaxObserver,
    QConfig,
    QConfigMapping,
    default_weight_observer,
    float16_static_qconfig,
    get_default_qconfig,
    get_default_qconfig_mapping,
)
from torch.ao.quantization.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    DTypeWithConstraints,
    ObservationType,
)
from torch.ao.quantization.fx._equalize import default_equalization_qconfig
from torch.ao.quantization.fx.custom_config import ConvertCustomConfig, PrepareCustomConfig
from torch.ao.quantization.utils import MatchAllNode
from torch.fx import GraphModule

import torchq_compat as tc
from tests.helpers.once import made_once
from tests.helpers.oracle import (
    activation_qparams,
    by_fx,
    by_us,
    fx_activation_qparams,
    leaves,
    nodes_of_each_result,
    sqnr,
)
from tests.helpers.side_by_side import side_by_side
from torchq_compat.errors import ConfigError, QuantizationWarning

Forward = Callable[..., Any]
FIXED = QConfig(FixedQParamsObserver.with_args(scale=0.05, zero_point=100), default_weight_observer)
FIXED_FAKE = QConfig(
    FixedQParamsFakeQuantize.with_args(observer=FixedQParamsObserver.with_args(scale=0.05, zero_point=100)),
    default_weight_observer,
)
QNNPACK = get_default_qconfig("qnnpack")
OWN_OBSERVER = ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT


class Net(nn.Module):
    """Two linears, two functionals and a ReLU, combined by ``code``."""

    def __init__(self, code: Forward, functional: type[nn.Module] = FloatFunctional) -> None:
        super().__init__()
        self.a, self.b, self.relu = nn.Linear(8, 8), nn.Linear(8, 8), nn.ReLU()
        self.ff, self.gg = functional(), functional()
        self._code = code

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self._code(self, x, y)


def batches(*shapes: tuple[int, ...]) -> list[tuple[Tensor, ...]]:
    return [tuple(torch.randn(*shape) for shape in shapes) for _ in range(3)]


def check(
    model: nn.Module, mapping: QConfigMapping, data: Any, least_db: float, **kwargs: Any
) -> GraphModule:
    """Assert FX's activation qparams (1e-5), and an SQNR within 0.5 dB of FX's and at least ``least_db``, for
    each result alone; return the prepared model."""
    model = model.eval()
    theirs, (prepared, ours) = by_fx(model, mapping, data, **kwargs)[1], by_us(model, mapping, data, **kwargs)
    of_results = zip(nodes_of_each_result(theirs), nodes_of_each_result(ours), strict=True)
    for number, (in_fx, in_ours) in enumerate([(None, None), *of_results]):
        a, b = sorted(fx_activation_qparams(theirs, in_fx)), sorted(activation_qparams(ours, in_ours))
        assert [(pytest.approx(scale, rel=1e-5), zero) for scale, zero in a] == b, number
        assert a
    with torch.no_grad():
        for reference, other, mine in zip(
            leaves(model(*data[0])), leaves(theirs(*data[0])), leaves(ours(*data[0])), strict=True
        ):
            assert sqnr(reference, mine) > least_db
            assert sqnr(reference, mine) < 70
            assert sqnr(reference, mine) == pytest.approx(sqnr(reference, other), abs=0.5)
    return prepared


# -- fixed qparams


def linear_add_linear(net: Any, x: Tensor, y: Tensor) -> Tensor:
    return net.b(net.a(x) + y)


def test_fixed_qparams_of_a_name_count_for_inputs_too() -> None:
    torch.manual_seed(0)
    mapping = get_default_qconfig_mapping("qnnpack")
    for number, qconfig in ((0, FIXED), (3, FIXED_FAKE)):
        mapping.set_module_name(f"{number}.a", qconfig)
        mapping.set_module_name(f"{number + 1}.b", qconfig)
        mapping.set_module_name_regex(rf"{number + 2}\.a", qconfig)
    model = side_by_side([Net(linear_add_linear) for _ in range(6)], [(2 * i, 2 * i + 1) for i in range(6)])
    check(model, mapping, batches(*[(4, 8)] * 12), 22)


@pytest.mark.parametrize("qconfig", [FIXED, FIXED_FAKE], ids=["observer", "fake_quantize"])
@pytest.mark.parametrize(
    "put",
    [
        lambda m, q: QConfigMapping().set_global(q),
        lambda m, q: m.set_module_name_object_type_order("", nn.Linear, 0, q),
        lambda m, q: m.set_object_type(nn.Linear, q),
        lambda m, q: m.set_object_type(operator.add, q),
    ],
    ids=["global", "order", "object_type", "add"],
)
def test_fixed_qparams_count_for_inputs_too(put: Any, qconfig: QConfig) -> None:
    torch.manual_seed(0)
    model = Net(linear_add_linear)
    check(model, put(get_default_qconfig_mapping("qnnpack"), qconfig), batches((4, 8), (4, 8)), 22)


def test_the_input_of_a_sigmoid_is_not_cut_to_its_result() -> None:
    """FX observes the input with [0, 1), so the float model is the reference here."""
    torch.manual_seed(0)
    model = Net(lambda s, x, y: s.b(torch.sigmoid(x) + y)).eval()
    data = batches((4, 8), (4, 8))
    mapping = get_default_qconfig_mapping("qnnpack")
    reference = model(*data[0])
    assert 28 < sqnr(reference, by_us(model, mapping, data)[1](*data[0])) < 60


def test_edges_of_one_observer_move_together() -> None:
    """x goes to the linear and to cat through one observer, which cat replaces by that of its first input."""
    torch.manual_seed(0)
    model = Net(lambda s, x, y: s.b(torch.cat([s.a(x), x]) * 2 + 1))
    check(model, get_default_qconfig_mapping("qnnpack"), batches((4, 8), (4, 8)), 30)


# -- FloatFunctional

FUNCTIONALS: dict[str, Forward] = {
    "add_relu": lambda s, x, y: s.ff.add_relu(s.a(x), y),
    "add + module": lambda s, x, y: s.relu(s.ff.add(s.a(x), y)),
    "add + function": lambda s, x, y: F.relu(s.ff.add(s.a(x), y)),
    "add + torch.relu": lambda s, x, y: torch.relu(s.ff.add(s.a(x), y)),
    "mul + module": lambda s, x, y: s.relu(s.ff.mul(s.a(x), y)),
    "cat + module": lambda s, x, y: s.relu(s.ff.cat([s.a(x), y])),
    "matmul": lambda s, x, y: s.ff.matmul(s.a(x), y.t()),
    "add_scalar": lambda s, x, y: s.relu(s.ff.add_scalar(s.a(x), 2.0)) + y,
    "mul_scalar": lambda s, x, y: s.ff.mul_scalar(s.a(x), 2.0) + y,
    "one after the other": lambda s, x, y: s.gg.add_relu(s.ff.mul(s.a(x), y), y),
    "used twice": lambda s, x, y: s.relu(s.ff.add(s.relu(s.ff.add(s.a(x), y)), y)),
}


@pytest.mark.parametrize("functional", [FloatFunctional, FXFloatFunctional])
def test_functionals_fuse_as_in_fx(functional: type[nn.Module]) -> None:
    torch.manual_seed(0)
    models = [Net(code, functional) for code in FUNCTIONALS.values()]
    # A concatenation replaces the observer of its second input by that of its first.
    model = side_by_side(models, [(0, 2 if "cat" in name else 1) for name in FUNCTIONALS])
    prepared = check(model, get_default_qconfig_mapping("qnnpack"), batches((4, 8), (4, 8), (4, 8)), 30)
    assert not [d.path for d in tc.explain(prepared) if "activation_post_process" in d.path]


# -- settings that contradict each other

OUTSIDE = [
    MinMaxObserver.with_args(dtype=torch.quint8, quant_min=-128, quant_max=127),
    MinMaxObserver.with_args(dtype=torch.quint8, quant_min=0, quant_max=65535),
    MinMaxObserver.with_args(dtype=torch.quint8, quant_min=0, quant_max=256),
    HistogramObserver.with_args(dtype=torch.quint8, quant_min=-128, quant_max=127),
    MinMaxObserver.with_args(
        dtype=torch.quint8, qscheme=torch.per_tensor_symmetric, quant_min=-128, quant_max=127
    ),
    FixedQParamsObserver.with_args(scale=0.1, zero_point=300),
    FixedQParamsObserver.with_args(scale=0.1, zero_point=-1),
    FixedQParamsObserver.with_args(scale=0.0, zero_point=0),
    FixedQParamsObserver.with_args(scale=-0.1, zero_point=0),
]


@pytest.mark.parametrize("activation", OUTSIDE, ids=range(len(OUTSIDE)))
def test_contradictory_activations_are_refused(activation: Any) -> None:
    model, (example,) = nn.Sequential(nn.Linear(8, 8)).eval(), batches((4, 8))[:1]
    mapping = QConfigMapping().set_global(QConfig(activation, default_weight_observer))
    with pytest.raises(ConfigError, match=r"qconfig\.activation.*(holds|zero point|scale)"):
        tc.prepare_fx(model, mapping, example)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (MinMaxObserver.with_args(dtype=torch.qint8, quant_min=0, quant_max=255), "qint8 holds -128 to 127"),
        (
            PerChannelMinMaxObserver.with_args(dtype=torch.qint8, quant_min=0, quant_max=255),
            "qint8 holds -128 to 127",
        ),
        (
            PerChannelMinMaxObserver.with_args(
                dtype=torch.qint8, qscheme=torch.per_channel_symmetric, ch_axis=5
            ),
            "the weight of '0': .* ch_axis 5, the tensor 2 dimensions",
        ),
    ],
)
def test_contradictory_weights_are_refused(weight: Any, message: str) -> None:
    model, (example,) = nn.Sequential(nn.Linear(8, 8)).eval(), batches((4, 8))[:1]
    with pytest.raises(ConfigError, match=message):
        tc.prepare_fx(model, QConfigMapping().set_global(QConfig(MinMaxObserver, weight)), example)


@pytest.mark.parametrize("limits", [(0, 127), (0, 15), (0, 255)])
def test_a_range_within_the_dtype_stays(limits: tuple[int, int]) -> None:
    torch.manual_seed(0)
    observer = MinMaxObserver.with_args(quant_min=limits[0], quant_max=limits[1])
    mapping = QConfigMapping().set_global(QConfig(observer, default_weight_observer))
    check(Net(lambda s, x, y: s.b(s.a(x) + y)), mapping, batches((4, 8), (4, 8)), 15)


# -- half precision in front of integers


JOINS: list[Forward] = [
    lambda s, x, y: torch.cat([s.a(x), s.b(y)]),
    lambda s, x, y: torch.cat([s.b(y), s.a(x)]),
    lambda s, x, y: F.max_pool1d(s.a(x), 3, 1, 1) + s.b(y),
    lambda s, x, y: s.a(x).transpose(0, 1).transpose(0, 1) + s.b(y),
    lambda s, x, y: torch.clamp(s.a(x), -0.5, 0.5) + s.b(y),
]


@pytest.mark.parametrize("half", ["a", "b"])
def test_integers_behind_half_precision(half: str) -> None:
    torch.manual_seed(0)
    mapping = get_default_qconfig_mapping("qnnpack")
    for number in range(len(JOINS)):
        mapping.set_module_name(f"{number}.{half}", float16_static_qconfig)
    model = side_by_side([Net(join) for join in JOINS], [(0, 1)] * len(JOINS))
    check(model, mapping, batches((4, 8), (4, 8)), 30)


# -- patterns of a BackendConfig

QUINT8 = DTypeWithConstraints(
    dtype=torch.quint8, quant_min_lower_bound=0, quant_max_upper_bound=255, scale_min_lower_bound=2**-12
)
WEIGHTED = DTypeConfig(
    input_dtype=QUINT8, output_dtype=QUINT8, weight_dtype=torch.qint8, bias_dtype=torch.float
)
PLAIN = DTypeConfig(input_dtype=torch.quint8, output_dtype=torch.quint8)


def row(pattern: Any, dtypes: DTypeConfig = WEIGHTED) -> BackendPatternConfig:
    made = BackendPatternConfig(pattern).set_observation_type(OWN_OBSERVER).add_dtype_config(dtypes)
    roots = {nn.Linear: nnqr.Linear, nni.ConvReLU2d: nnqr.Conv2d}
    if pattern in roots:
        made.set_root_module(nn.Conv2d if pattern is nni.ConvReLU2d else pattern)
        made.set_reference_quantized_module(roots[pattern])
    return made


def complex_row(pattern: Any, dtypes: DTypeConfig = WEIGHTED) -> BackendPatternConfig:
    made = BackendPatternConfig()._set_pattern_complex_format(pattern)
    return made.set_observation_type(OWN_OBSERVER).add_dtype_config(dtypes)


def conv_relu(*, with_dtypes: bool) -> BackendPatternConfig:
    made = BackendPatternConfig((nn.Conv2d, nn.ReLU)).set_fused_module(nni.ConvReLU2d)
    made.set_fuser_method(lambda is_qat, conv, relu: nni.ConvReLU2d(conv, relu))
    return made.set_observation_type(OWN_OBSERVER).add_dtype_config(WEIGHTED) if with_dtypes else made


def backend(*rows: BackendPatternConfig) -> BackendConfig:
    return BackendConfig("mine").set_backend_pattern_configs(list(rows))


class Tutorial(nn.Module):
    """The model from the tutorial on BackendConfig."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.conv = nn.Linear(10, 3), nn.Conv2d(3, 3, 3)
        self.relu, self.sigmoid = nn.ReLU(), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return self.sigmoid(self.relu(self.conv(self.linear(x))))


@pytest.mark.parametrize(
    ("config", "conv_is_quantized"),
    [
        (backend(row(nn.Linear), conv_relu(with_dtypes=True), row(nni.ConvReLU2d)), True),
        (backend(row(nn.Linear), conv_relu(with_dtypes=False), row(nni.ConvReLU2d)), True),
        (backend(row(nn.Linear), conv_relu(with_dtypes=True)), False),
    ],
    ids=["both rows", "dtypes at the fused module", "no row for the fused module"],
)
def test_the_row_of_the_fused_module_counts(config: BackendConfig, conv_is_quantized: bool) -> None:
    torch.manual_seed(0)
    activation = MinMaxObserver.with_args(quant_min=0, quant_max=255, eps=2**-12)
    weight = MinMaxObserver.with_args(dtype=torch.qint8, quant_min=-128, quant_max=127)
    mapping = QConfigMapping().set_global(QConfig(activation, weight))
    data = [(torch.randn(1, 3, 10, 10),) for _ in range(3)]
    prepared = check(Tutorial(), mapping, data, 40, backend_config=config)
    decided = {d.path: str(d.action) for d in tc.explain(prepared)}
    assert decided["conv"] == ("quantized" if conv_is_quantized else "float")


@pytest.mark.parametrize(
    ("pattern", "root", "code"),
    [
        ((nn.ReLU, (operator.add, nn.Linear, MatchAllNode)), 1, lambda s, x, y: s.relu(s.a(x) + y)),
        ((nn.ReLU, (operator.add, nn.Linear, MatchAllNode)), 1, lambda s, x, y: s.relu(y + s.a(x))),
        ((nn.ReLU, (operator.add, MatchAllNode, nn.Linear)), 2, lambda s, x, y: s.relu(s.a(x) + y)),
        ((operator.add, nn.Linear, MatchAllNode), 1, lambda s, x, y: s.a(x) + y),
        ((operator.add, nn.Linear, MatchAllNode), 1, lambda s, x, y: F.relu(s.a(x) + y)),
    ],
)
def test_complex_patterns_with_a_root(pattern: Any, root: int, code: Forward) -> None:
    torch.manual_seed(0)
    fused = complex_row(pattern)
    fused._set_root_node_getter(lambda found: (found[1] if pattern[0] is nn.ReLU else found)[root])
    config = backend(row(nn.Linear), row(operator.add, PLAIN), fused)
    check(
        Net(code),
        QConfigMapping().set_global(get_default_qconfig("qnnpack")),
        batches((4, 8), (4, 8)),
        30,
        backend_config=_without_constraints(config),
    )


def _without_constraints(config: BackendConfig) -> BackendConfig:
    for found in config.configs:
        if found.dtype_configs == [WEIGHTED]:
            found.dtype_configs = [DTypeConfig(torch.quint8, torch.quint8, torch.qint8, torch.float)]
    return config


def test_a_pattern_in_which_two_ops_meet_is_named() -> None:
    config = backend(row(nn.Linear), complex_row((nn.ReLU, (operator.add, nn.Linear, nn.Linear))))
    model = Net(lambda s, x, y: s.relu(s.a(x) + s.b(y))).eval()
    with pytest.warns(QuantizationWarning, match=r"ReLU\(add\(Linear, Linear\)\) is not used"):
        tc.prepare_fx(model, QConfigMapping(), batches((4, 8), (4, 8))[0], backend_config=config)


# -- names that match nothing


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.head(self.encoder(x)))


@made_once
def named() -> nn.Module:
    return Named().eval()


NAMED_INPUT = (torch.randn(4, 8),)


def default() -> QConfigMapping:
    return get_default_qconfig_mapping("qnnpack")


class Own(nn.Module):
    """A class with an observed form and a quantized one, neither used by the model."""

    @classmethod
    def from_float(cls, float_module: nn.Module) -> nn.Module:
        return cls()

    from_observed = from_float


UNMATCHED: list[tuple[Any, Any, str]] = [
    (default().set_module_name("encodr", None), None, "module_name 'encodr'.* did you mean 'encoder'"),
    ({"": QNNPACK, "module_name": [("haed", None)]}, None, "module_name 'haed'.* did you mean 'head'"),
    (default().set_module_name_regex("0", None), None, "module_name_regex '0'.* beginning"),
    (default().set_module_name_regex("z+", None), None, r"module_name_regex 'z\+'"),
    (default().set_object_type("resahpe", None), None, "object_type 'resahpe'.* did you mean 'reshape'"),
    (
        default().set_module_name_object_type_order("encoderr", nn.Linear, 0, None),
        None,
        "'encoderr', Linear, 0.* did you mean 'encoder'",
    ),
    (
        default().set_module_name_object_type_order("encoder", nn.Linear, 3, None),
        None,
        "Linear, 3.* calls Linear 1 times",
    ),
    (
        default().set_module_name_object_type_order("encoder", nn.Conv2d, 0, None),
        None,
        "Conv2d, 0.* has no Conv2d",
    ),
    (
        default().set_module_name_object_type_order("", F.gelu, 0, None),
        None,
        "gelu, 0.* never calls gelu",
    ),
    (
        default(),
        PrepareCustomConfig().set_non_traceable_module_names(["enc"]),
        "non_traceable_module_name 'enc'",
    ),
    (
        default(),
        PrepareCustomConfig().set_non_traceable_module_classes([nn.GRU]),
        "non_traceable_module_class GRU",
    ),
    (default(), {"non_traceable_module_name": ["hed"]}, "'hed'.* did you mean 'head'"),
    (
        default(),
        PrepareCustomConfig().set_standalone_module_name("heads", None, (torch.ones(4, 8),), None, None),
        "standalone_module_name 'heads'.* did you mean 'head'",
    ),
    (
        default(),
        PrepareCustomConfig().set_standalone_module_class(nn.GRU, None, (torch.ones(4, 8),), None, None),
        "standalone_module_class GRU",
    ),
    (
        default(),
        PrepareCustomConfig().set_float_to_observed_mapping(Own, Own),
        "float_to_observed_mapping Own",
    ),
    (default(), PrepareCustomConfig().set_input_quantized_indexes([3]), "input_quantized_indexes has 3"),
    (default(), {"output_quantized_idxs": [2]}, "output_quantized_indexes has 2"),
    (
        default(),
        PrepareCustomConfig().set_preserved_attributes(["hedd"]),
        "preserved_attributes 'hedd'",
    ),
]


@pytest.mark.parametrize(("mapping", "config", "message"), UNMATCHED, ids=range(len(UNMATCHED)))
def test_a_name_that_matches_nothing_is_warned_about(mapping: Any, config: Any, message: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prepared = tc.prepare_fx(named(), mapping, NAMED_INPUT, config)
    ours = [str(w.message) for w in caught if w.category is QuantizationWarning]
    assert len(ours) == 1
    assert re.search(message, ours[0])
    assert any(d.action == "quantized" for d in tc.explain(prepared))


@pytest.mark.parametrize(
    "mapping",
    [
        default(),
        get_default_qconfig_mapping("x86").set_module_name("encoder.0", None),
        default().set_module_name_regex("enc.*", None),
        default().set_module_name_object_type_order("encoder", nn.Linear, 0, None),
        default().set_module_name_object_type_order("", F.relu, 0, None),
        default().set_object_type(nn.Conv3d, None),
    ],
)
def test_what_matches_is_not_warned_about(mapping: QConfigMapping) -> None:
    configs = tc.get_default_prepare_custom_config(), tc.get_default_convert_custom_config()
    with warnings.catch_warnings():
        warnings.simplefilter("error", QuantizationWarning)
        prepared = tc.prepare_fx(named(), mapping, NAMED_INPUT, configs[0])
        prepared(torch.randn(4, 8))
        tc.convert_to_reference_fx(prepared, configs[1])


@made_once
def calibrated() -> GraphModule:
    prepared = tc.prepare_fx(named(), default(), NAMED_INPUT)
    prepared(torch.randn(4, 8))
    return prepared


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"convert_custom_config": ConvertCustomConfig().set_observed_to_quantized_mapping(Own, Own)},
            "observed_to_quantized_mapping Own is not used",
        ),
        (
            {"convert_custom_config": ConvertCustomConfig().set_preserved_attributes(["hedd"])},
            "preserved_attributes 'hedd' is not used",
        ),
        (
            {"qconfig_mapping": default().set_module_name("haed", None)},
            "module_name 'haed' is not used.* did you mean 'head'",
        ),
        ({"qconfig_mapping": default().set_module_name_regex("z+", None)}, r"module_name_regex 'z\+' is not"),
        ({"_remove_qconfig": False}, "_remove_qconfig=False changes nothing"),
    ],
)
def test_what_convert_cannot_use_is_warned_about(arguments: dict[str, Any], message: str) -> None:
    with pytest.warns(QuantizationWarning, match=message):
        tc.convert_to_reference_fx(calibrated(), **arguments)


def test_an_equalization_config_that_asks_for_nothing() -> None:
    without = tc.prepare_fx(named(), default(), NAMED_INPUT)
    assert len(tc.explain(without)) > 2
    for empty in (QConfigMapping(), {}, {"": None}):
        with_empty = tc.prepare_fx(named(), default(), NAMED_INPUT, None, empty)
        assert tc.explain(with_empty).as_dicts() == tc.explain(without).as_dicts(), empty


def test_an_equalization_config_that_asks_for_something() -> None:
    asking = QConfigMapping().set_object_type(nn.Linear, default_equalization_qconfig)
    with pytest.raises(ConfigError, match="_equalization_config is not supported"):
        tc.prepare_fx(named(), default(), (torch.randn(4, 8),), None, asking)
