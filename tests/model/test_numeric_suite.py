"""The Numeric Suite and ModelReport, given models of ours or their states by a script, say what to call."""

from __future__ import annotations

import copy
import io
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.ns._numeric_suite as eager
import torch.ao.ns._numeric_suite_fx as fx
from torch import nn
from torch.ao.quantization import QuantWrapper, get_default_qconfig, get_default_qconfig_mapping
from torch.ao.quantization.fx._model_report.detector import DynamicStaticDetector, OutlierDetector
from torch.ao.quantization.fx._model_report.model_report import ModelReport
from torch.fx import GraphModule

from torchq_compat import convert_fx, convert_to_reference_fx, prepare_fx, quantize_eager
from torchq_compat.errors import ConfigError, ScriptError

FLOAT = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)).eval()
X = torch.randn(2, 3, 8, 8)
CALLS: dict[str, Callable[[nn.Module, GraphModule], Any]] = {
    "compare_weights": lambda model, q: eager.compare_weights(model.state_dict(), q.state_dict()),
    "compare_weights of a copy": lambda m, q: eager.compare_weights(
        m.state_dict(), copy.copy(q.state_dict())
    ),
    "compare_weights reversed": lambda model, q: eager.compare_weights(q.state_dict(), model.state_dict()),
    "compare_model_outputs": lambda model, q: eager.compare_model_outputs(model, q, X),
    "compare_model_stub": lambda model, q: eager.compare_model_stub(model, q, {nn.Linear}, X),
    "get_logger_dict": lambda _, q: eager.get_logger_dict(q),
    "extract_weights": lambda model, q: fx.extract_weights("a", model, "b", q),
    "add_loggers": lambda model, q: fx.add_loggers("a", model, "b", q, fx.OutputLogger),
    "add_shadow_loggers": lambda model, q: fx.add_shadow_loggers("a", model, "b", q, fx.OutputLogger),
    "extract_logger_info": lambda _, q: fx.extract_logger_info(q, q, fx.OutputLogger, "b"),
}


@pytest.fixture(scope="module")
def models() -> dict[str, GraphModule]:
    prepared = prepare_fx(FLOAT, get_default_qconfig_mapping("x86"), (X,))
    prepared(X)
    return {
        "prepared": prepared,
        "converted": convert_fx(prepared),
        "reference": convert_to_reference_fx(prepared),
    }


@pytest.mark.parametrize("stage", ["prepared", "converted", "reference"])
@pytest.mark.parametrize("name", CALLS)
def test_refused(models: dict[str, GraphModule], stage: str, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ScriptError) as raised:
            CALLS[name](copy.deepcopy(FLOAT), copy.deepcopy(models[stage]))
    assert raised.value.message.startswith(f"{name.split()[0]} of the Numeric Suite finds nothing")
    assert "torchq_compat.compare" in str(raised.value)


@pytest.mark.parametrize("stage", ["prepared", "converted", "reference"])
@pytest.mark.parametrize("detector", [DynamicStaticDetector, OutlierDetector])
def test_model_report_is_refused(models: dict[str, GraphModule], stage: str, detector: type) -> None:
    model = copy.deepcopy(models[stage])
    before = model(X)
    with pytest.raises(ScriptError, match="of ModelReport finds nothing") as raised:
        ModelReport(model, {detector()}).prepare_detailed_calibration()
    assert raised.value.code == "TQ972"
    assert torch.equal(model(X), before)
    assert "torchq_compat.suggest" in str(raised.value)


@pytest.mark.parametrize("stage", ["prepared", "converted", "reference"])
def test_a_state_is_a_state(models: dict[str, GraphModule], stage: str) -> None:
    model = models[stage]
    state = model.state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert type(loaded) is OrderedDict
    assert loaded._metadata == state._metadata
    for other in (loaded, copy.deepcopy(state), copy.copy(state), OrderedDict(state), {**state}):
        assert list(other) == list(state) == list(state.keys())
    assert loaded.keys() > {name for name, _ in model.named_parameters()}
    target = copy.deepcopy(model)
    assert str(target.load_state_dict(loaded)) == "<All keys matched successfully>"
    assert torch.equal(target(X), model(X))
    outer = nn.Sequential(model).state_dict()
    assert [key.removeprefix("0.") for key in outer] == list(state)


@pytest.mark.parametrize("name", ["compare_model_outputs", "compare_model_stub", "prepare"])
def test_refused_for_models_of_eager_mode(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``prepare``: as under ``run``, where the suite calls this package's function of that name."""
    model = QuantWrapper(copy.deepcopy(FLOAT))
    model.qconfig = get_default_qconfig("x86")  # type: ignore[assignment]
    prepared = quantize_eager.prepare(model)
    prepared(X)
    converted = quantize_eager.convert(prepared)
    assert len(eager.compare_weights(model.state_dict(), converted.state_dict())) == 2
    if name == "prepare":
        monkeypatch.setattr(eager, "prepare", quantize_eager.prepare)
    called = "compare_model_outputs" if name == "prepare" else name
    with pytest.raises(ScriptError, match=f"{called} of the Numeric Suite finds nothing"):
        CALLS[called](model, converted)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="converted already"):
        quantize_eager.prepare(converted)


def test_the_suite_itself_is_as_it_was() -> None:
    assert list(eager.compare_weights(FLOAT.state_dict(), FLOAT.state_dict())) == ["0.weight", "3.weight"]
