"""The summary at the end of ``torchq-compat run``: its counts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import (
    default_dynamic_qconfig,
    get_default_qat_qconfig_mapping,
    get_default_qconfig_mapping,
)

import torchq_compat as tc
from torchq_compat.migrate.running.recorder import Recorder


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


@pytest.mark.parametrize("is_qat", [False, True])
def test_what_is_not_as_in_fx(is_qat: bool) -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.out = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.fc(x.reshape(-1, 4)))

    recorder, x = Recorder(), torch.randn(8, 2, 2)
    prepare = recorder.wrap(tc.prepare_qat_fx if is_qat else tc.prepare_fx)
    mapping = get_default_qat_qconfig_mapping("x86") if is_qat else get_default_qconfig_mapping("x86")
    prepared = prepare(Flat().train(is_qat), mapping, (x,))
    prepared(x)
    assert "FX converts with others" not in recorder.summary("script.py")
    recorder.wrap(tc.convert_fx)(prepared.eval())
    lines = [line.strip() for line in recorder.summary("script.py").splitlines() if "unlike FX" in line]
    trained = [line for line in lines if line.startswith("unlike FX: converted with the qparams")]
    assert len(trained) == is_qat
    assert "unlike FX: fc: FX leaves it float: behind a reshape of floats it observes nothing" in lines
    assert len(lines) == 1 + is_qat
