"""Impossible configurations: an error that names the setting, or a reason for what stays float."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

# BackendConfig uses a submodule of its package that the package itself does not import.
import torch.ao.quantization.backend_config.utils
from torch import nn
from torch.ao.quantization import (
    MinMaxObserver,
    NoopObserver,
    PlaceholderObserver,
    QConfig,
    QConfigMapping,
    RecordingObserver,
    default_weight_observer,
    get_default_qconfig,
    get_default_qconfig_mapping,
)
from torch.ao.quantization.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    DTypeWithConstraints,
)
from torch.ao.quantization.utils import MatchAllNode

import torchq_compat as tc
from tests.helpers.once import made_once
from torchq_compat.errors import ConfigError, ConvertError, QuantizationWarning

X86 = get_default_qconfig("x86")
X = torch.randn(2, 3, 7, 7)


@made_once
def model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)).eval()


def everywhere(activation: Any, weight: Any = default_weight_observer) -> QConfigMapping:
    return QConfigMapping().set_global(QConfig(activation, weight))


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"": X86, "module_names": []}, r"qconfig_mapping has the unknown key 'module_names'"),
        ({"": X86, "module_name_regex": [("(conv", X86)]}, r"module_name_regex '\(conv' does not compile"),
        (
            QConfigMapping().set_object_type(nn.Conv2d, X86).set_object_type(nn.ReLU, None),
            r"object_type: '0' starts the fused pattern Conv2d \+ ReLU, but the qconfig of ReLU",
        ),
        (QConfigMapping().set_global("x86"), r"the global entry must be a QConfig or None, got str"),
        (
            QConfigMapping().set_module_name("0", QConfig),
            r"module_name '0' must be a QConfig or None",
        ),
        (everywhere(MinMaxObserver.with_args(dtype=torch.int64)), r"qconfig.activation cannot make its obs"),
        (
            everywhere(MinMaxObserver, MinMaxObserver.with_args(dtype=torch.float32)),
            r"qconfig.weight cannot make its observer",
        ),
        (everywhere(PlaceholderObserver.with_args(dtype=torch.complex64)), r"dtype torch.complex64 is not"),
        (everywhere(nn.Identity), r"qconfig.activation is not an observer or fake-quantize constructor"),
    ],
)
def test_mapping(mapping: Any, message: str) -> None:
    float_model = model()
    before = {name: value.clone() for name, value in float_model.state_dict().items()}
    with pytest.raises(ConfigError, match=f"(?s){message}.*Hint:"):
        tc.prepare_fx(float_model, mapping, (X,))
    assert all(torch.equal(value, before[name]) for name, value in float_model.state_dict().items())
    assert not any(hasattr(module, "qconfig") for module in float_model.modules())


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ({"name": "mine", "config": []}, "backend_config has the unknown key 'config'"),
        ("qnnpack", "backend_config must be a BackendConfig, got str"),
        ({"name": "mine", "configs": [3]}, "backend_config could not be read"),
        (
            {"name": "mine", "configs": [{"pattern": nn.Linear, "dtype_config": []}]},
            r"backend_config: configs\[0\] has the unknown key 'dtype_config'",
        ),
    ],
)
def test_backend_config(backend: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}.*Hint:"):
        tc.prepare_fx(model(), get_default_qconfig_mapping("x86"), (X,), backend_config=backend)


def test_a_pattern_that_matches_anything_on_one_side_is_no_bad_input() -> None:
    pattern = (torch.add, nn.Conv2d, MatchAllNode)
    backend = BackendConfig("mine").set_backend_pattern_config(
        BackendPatternConfig()._set_pattern_complex_format(pattern)
    )
    prepared = tc.prepare_fx(model(), get_default_qconfig_mapping("x86"), (X,), backend_config=backend)
    decided = tc.explain(prepared)
    reasons = {decision.reason for decision in decided if decision.kind == "Conv2d"}
    assert reasons == {"the backend config 'mine' has no pattern for it"}


@pytest.mark.parametrize("observer", [RecordingObserver, NoopObserver.with_args(dtype=torch.quint8)])
@pytest.mark.parametrize("of_weight", [False, True], ids=["activation", "weight"])
def test_observers_that_compute_no_qparams_are_refused_at_convert(observer: Any, of_weight: bool) -> None:
    weight = observer.with_args(dtype=torch.qint8) if of_weight else default_weight_observer
    prepared = tc.prepare_fx(model(), everywhere(MinMaxObserver if of_weight else observer, weight), (X,))
    prepared(X)
    with pytest.raises(ConvertError, match="compute no scale and zero point"):
        tc.convert_fx(prepared)


def constrained(**limits: Any) -> BackendConfig:
    activation = DTypeWithConstraints(dtype=torch.quint8, **limits)
    config = DTypeConfig(activation, activation, torch.qint8, torch.float32)
    return BackendConfig("strict").set_backend_pattern_config(
        BackendPatternConfig(nn.Conv2d).set_dtype_configs([config])
    )


@pytest.mark.parametrize(
    ("activation", "limits", "reason"),
    [
        (
            MinMaxObserver,
            {"quant_min_lower_bound": 0, "quant_max_upper_bound": 127},
            "activation quant_min and quant_max are [0, 255], they have to be within [0, 127]",
        ),
        (MinMaxObserver, {"scale_min_lower_bound": 2**-8}, "eps is 1.1920928955078125e-07, it has to be at"),
        (
            MinMaxObserver,
            {"scale_exact_match": 2**-8, "zero_point_exact_match": 0},
            "activation has no fixed qparams, it takes fixed qparams with scale 0.00390625 and zero point 0",
        ),
        (MinMaxObserver.with_args(dtype=torch.qint8), {}, "activation int8 where it takes quint8"),
        (
            PlaceholderObserver.with_args(dtype=torch.bfloat16),
            {},
            "activation bfloat16 where it takes quint8",
        ),
        (PlaceholderObserver.with_args(dtype=torch.quint8, is_dynamic=True), {}, "have to be static"),
    ],
)
def test_what_a_backend_does_not_take_stays_float_and_says_why(
    activation: Any, limits: dict[str, Any], reason: str
) -> None:
    with pytest.warns(QuantizationWarning, match=r"stays? float: the backend does not support"):
        prepared = tc.prepare_fx(model(), everywhere(activation), (X,), backend_config=constrained(**limits))
    (decision,) = tc.explain(prepared).find("0")
    assert decision.action == "float"
    assert reason in decision.reason


def test_rules_about_modules_that_are_not_there_are_reported() -> None:
    mapping = (
        get_default_qconfig_mapping("x86")
        .set_module_name("encoder", None)
        .set_module_name("0", None)
        .set_module_name_regex("decoder.*", None)
        .set_module_name_object_type_order("head", nn.Linear, 0, None)
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", QuantizationWarning)
        prepared = tc.prepare_fx(model(), mapping, (X,))
    said = [str(w.message) for w in caught if w.category is QuantizationWarning]
    rules = {
        "module_name 'encoder'",
        "module_name_regex 'decoder.*'",
        "module_name_object_type_order ('head', Linear, 0)",
    }
    (text,) = said
    assert text.count("dropped: ") == 2  # the name and the type order have the same reason
    assert all(repr(rule) in text for rule in rules)
    assert {d.path for d in tc.explain(prepared) if d.action == "dropped"} == rules
