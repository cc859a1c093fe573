"""Wrong objects in place of an argument: the error says what the object is and what to write."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import (
    QConfig,
    QConfigMapping,
    default_fake_quant,
    default_fixed_qparams_range_0to1_fake_quant,
    default_qconfig,
    default_weight_observer,
    get_default_qat_qconfig_mapping,
    get_default_qconfig_mapping,
)

import torchq_compat as tc
from torchq_compat.errors import (
    ArgumentError,
    CaptureError,
    ConfigError,
    ConvertError,
    InputError,
    QuantizationWarning,
)

X = (torch.randn(3, 4),)
MAPPING = get_default_qconfig_mapping("x86")
PREPARES = (tc.prepare_fx, tc.prepare_qat_fx)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()


@pytest.mark.parametrize("prepare", PREPARES)
@pytest.mark.parametrize(
    ("mapping", "hint"),
    [
        (default_qconfig, r"QConfigMapping\(\)\.set_global\(qconfig\)"),
        ("x86", r"get_default_qconfig_mapping\('x86'\)"),
        (X, r"example_inputs, which come third"),
        (X[0], r"example_inputs, which come third"),
    ],
)
def test_no_mapping(prepare: Callable[..., Any], mapping: object, hint: str) -> None:
    with pytest.raises(ConfigError, match=rf"must be a QConfigMapping, got .*\nHint: .*{hint}"):
        prepare(net(), mapping, X)


@pytest.mark.parametrize("prepare", PREPARES)
def test_the_model_stands_second(prepare: Callable[..., Any]) -> None:
    with pytest.raises(ArgumentError, match=r"as the second argument\.\nHint: the order is prepare_"):
        prepare(MAPPING, net(), X)


def test_observers_in_training_are_told() -> None:
    with pytest.warns(QuantizationWarning, match="no fake-quantize, so training does not see the rounding"):
        tc.prepare_qat_fx(net().train(), MAPPING, X)
    tc.prepare_qat_fx(net().train(), get_default_qat_qconfig_mapping("x86"), X)


def test_fake_quantizes_in_calibration_are_told() -> None:
    model = net()
    with pytest.warns(QuantizationWarning, match="has fake-quantizes, which are for training") as told:
        prepared = tc.prepare_fx(model, get_default_qat_qconfig_mapping("x86"), X)
    assert [each.category for each in told].count(QuantizationWarning) == 1
    assert not torch.equal(prepared(*X), model(*X)), "rounded while it calibrates, as the warning says"
    assert torch.equal(tc.prepare_fx(model, MAPPING, X)(*X), model(*X))
    fixed = QConfig(default_fixed_qparams_range_0to1_fake_quant, default_weight_observer)
    half = QConfig(default_fake_quant, default_weight_observer)
    for silent in (fixed, half):
        tc.prepare_fx(net(), QConfigMapping().set_global(silent), X)


def test_a_class_and_a_converted_model_are_named() -> None:
    with pytest.raises(InputError, match=r"got the class Linear\.\nHint: make one: Linear\(\.\.\.\)"):
        tc.prepare_fx(nn.Linear, MAPPING, X)  # type: ignore[arg-type]
    prepared = tc.prepare_fx(net(), MAPPING, X)
    prepared(*X)
    with pytest.raises(ConvertError, match=r"is converted already\.\nHint: convert what prepare_fx"):
        tc.convert_fx(tc.convert_fx(prepared))


def test_torch_logs_nothing_of_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    records: list[logging.LogRecord] = []
    monkeypatch.setattr(logging.Logger, "callHandlers", lambda _, record: records.append(record))
    with pytest.warns(QuantizationWarning, match="does not run on the example_inputs"):
        tc.prepare_fx(net(), MAPPING, (torch.randn(3, 11),))
    assert [record.msg for record in records if record.levelno >= logging.WARNING] == []


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


def test_no_traceback_of_torch_export_is_printed() -> None:
    with pytest.raises(CaptureError) as caught:
        tc.prepare_fx(Branching().eval(), MAPPING, X)
    printed = "".join(traceback.format_exception(caught.value.__cause__))
    assert "During handling of the above exception" not in printed
    assert "site-packages/torch/" not in printed
    assert "test_mistaken_arguments.py" in str(caught.value)
    assert len(printed.splitlines()) < 40
