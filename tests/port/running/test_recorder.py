"""The summary at the end of ``torchq-compat run``: its counts."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.ao.quantization.quantize_fx as fx
from torch import Tensor, nn
from torch.ao.quantization import (
    QuantWrapper,
    default_dynamic_qconfig,
    default_qconfig,
    get_default_qat_qconfig_mapping,
    get_default_qconfig_mapping,
)
from torch.fx import symbolic_trace

import torchq_compat as tc
from tests.helpers.oracle import sqnr
from torchq_compat import quantize_eager
from torchq_compat.errors import QuantizationWarning
from torchq_compat.port.running.recorder import Recorder


class Pooled(nn.Module):
    """The head of MobileNetV2."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu = nn.Conv2d(3, 4, 3), nn.ReLU()
        self.head = nn.Sequential(nn.Dropout(), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.relu(self.conv(x)).mean([2, 3]))


def test_what_moves_values_is_not_counted_as_quantized() -> None:
    """A dropout in evaluation is in FX's BackendConfig, but nobody would call it quantized."""
    x = torch.randn(2, 3, 8, 8)
    recorder = Recorder()
    prepared = recorder.wrap(tc.prepare_fx)(Pooled().eval(), get_default_qconfig_mapping("x86"), (x,))
    prepared(x)
    converted = recorder.wrap(tc.convert_fx)(prepared)
    (dropout,) = [each for each in tc.explain(converted.reference) if each.kind == "Dropout"]
    assert dropout.action.value == "quantized"
    summary = recorder.summary("script.py")
    assert "Dropout" not in summary
    assert "quantized (1 Conv2d + ReLU, " in summary
    assert ", 0 float" in summary


def test_functions_that_no_model_passed_through() -> None:
    recorder = Recorder()
    assert "prepared no model" in recorder.summary("script.py")
    recorder.wrap(tc.quantize_dynamic)(
        nn.Sequential(nn.Linear(4, 4), nn.ReLU()), {nn.Linear: default_dynamic_qconfig}
    )
    assert recorder.summary("script.py").splitlines()[1:] == [
        "  Sequential, quantized dynamically: 1 DynamicQuantizedLinear"
    ]


class Flat(nn.Module):
    """FX quantizes ``out`` alone."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(self.fc(x.reshape(-1, 4)))
        return result


@pytest.mark.parametrize("is_qat", [False, True])
def test_what_is_not_as_in_fx(is_qat: bool) -> None:
    recorder, x = Recorder(), torch.randn(8, 2, 2)
    prepare = recorder.wrap(tc.prepare_qat_fx if is_qat else tc.prepare_fx)
    mapping = get_default_qat_qconfig_mapping("x86") if is_qat else get_default_qconfig_mapping("x86")
    prepared = prepare(Flat().train(is_qat), mapping, (x,))
    prepared(x)
    assert "TQ511" not in recorder.summary("script.py")
    recorder.wrap(tc.convert_fx)(prepared.eval())
    lines = [line.strip() for line in recorder.summary("script.py").splitlines() if "unlike FX" in line]
    trained = [
        line for line in lines if line.startswith("unlike FX: its fake-quantizes convert to what was trained")
    ]
    assert [line[-7:] for line in trained] == ["[TQ511]"] * is_qat
    assert any(
        line.startswith("unlike FX: fc: FX leaves it float: behind a reshape of floats") for line in lines
    )
    assert len(lines) == 1 + is_qat


def test_eager_models_are_told_to_round_otherwise() -> None:
    recorder, x = Recorder(), torch.randn(8, 4)
    model = QuantWrapper(nn.Linear(4, 4)).eval()
    model.qconfig = default_qconfig  # type: ignore[assignment]
    prepared = recorder.wrap(quantize_eager.prepare)(model)
    prepared(x)
    assert "TQ576" not in recorder.summary("script.py")
    recorder.wrap(quantize_eager.convert)(prepared)
    assert recorder.summary("script.py").count("[TQ576]") == 1


def test_a_symbolically_traced_model_is_counted_whole(recwarn: pytest.WarningsRecorder) -> None:
    """Its containers are plain modules in training mode, also of a model in evaluation."""
    recorder, x = Recorder(), torch.randn(8, 4)
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2)).eval()
    traced = symbolic_trace(model)
    assert traced.get_submodule("0").training
    recorder.wrap(tc.prepare_fx)(traced, get_default_qconfig_mapping("x86"), (x,))
    assert "2 quantized (1 Linear + ReLU, 1 Linear), 0 float" in recorder.summary("script.py")
    assert not [each for each in recwarn if "training" in str(each.message)]


def test_what_was_dropped_of_a_module_hides_none_of_its_ops() -> None:
    recorder, x = Recorder(), torch.randn(8, 4)
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2)).eval()
    model[0].training = True
    with pytest.warns(QuantizationWarning, match="training mode"):
        recorder.wrap(tc.prepare_fx)(model, get_default_qconfig_mapping("x86"), (x,))
    assert "2 quantized (1 Linear + ReLU, 1 Linear), 0 float" in recorder.summary("script.py")


def test_left_float_as_told_it_is_nearer_to_fx() -> None:
    """Not the same: FX rounds the weight of what it leaves float."""
    model, x = Flat().eval(), torch.randn(64, 2, 2)
    theirs = fx.prepare_fx(copy.deepcopy(model), get_default_qconfig_mapping("x86"), (x,))
    theirs(x)
    expected = fx.convert_fx(theirs)(x)
    near = []
    for mapping in (
        get_default_qconfig_mapping("x86"),
        get_default_qconfig_mapping("x86").set_module_name("fc", None),
    ):
        prepared = tc.prepare_fx(model, mapping, (x,))
        prepared(x)
        near.append(sqnr(expected, tc.convert_fx(prepared)(x)))
    assert 20 < near[0] + 1 < near[1]


def test_the_trained_weights_are_copied_as_told() -> None:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)
    ).train()
    theirs, batches = copy.deepcopy(model), [torch.randn(8, 2, 5, 5) for _ in range(3)]
    for engine, each in ((tc, model), (fx, theirs)):
        prepared = engine.prepare_qat_fx(each, get_default_qat_qconfig_mapping("x86"), (batches[0],))
        optimizer = torch.optim.SGD(prepared.parameters(), 0.1)
        for batch in batches:
            optimizer.zero_grad()
            prepared(batch).square().sum().backward()
            optimizer.step()
        if engine is tc:
            assert not torch.allclose(model[0].weight, prepared.state_dict()["0.weight"])
            model.load_state_dict(prepared.state_dict(), strict=False)
    torch.testing.assert_close(model[0].weight, theirs[0].weight)
    torch.testing.assert_close(model[1].running_var, theirs[1].running_var)
    torch.testing.assert_close(model[4].bias, theirs[4].bias)
