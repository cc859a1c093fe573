"""Calibration with single steps only: a hidden projection is never seen, which convert warns about."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization import get_default_qat_qconfig_mapping, get_default_qconfig_mapping
from torch.fx import GraphModule

import torchq_compat as tc
from tests.helpers.once import made_once
from tests.helpers.oracle import sqnr
from tests.helpers.packed_models import map_all
from torchq_compat.errors import QuantizationNote, QuantizationWarning

SAYS = r"'0' was calibrated with single steps alone"


@made_once
def prepared(engine: str, kind: Any, *, bias: bool, is_qat: bool) -> tuple[nn.Module, GraphModule]:
    model = nn.Sequential(kind(6, 8, bias=bias)).train(is_qat)
    # Large enough that much is lost without the range of the hidden projection.
    model[0].weight_hh_l0.data *= 2
    mapping = (get_default_qat_qconfig_mapping if is_qat else get_default_qconfig_mapping)(engine)
    prepare = tc.prepare_qat_fx if is_qat else tc.prepare_fx
    return model, prepare(model, mapping, (torch.randn(4, 3, 6),), map_all())


@pytest.mark.parametrize(
    ("engine", "kind", "bias", "is_qat"),
    [("x86", nn.LSTM, True, False), ("qnnpack", nn.GRU, False, False), ("x86", nn.RNN, True, True)],
)
def test_single_steps(engine: str, kind: Any, bias: bool, is_qat: bool) -> None:
    def converted(steps: int) -> tuple[nn.Module, GraphModule]:
        model, observed = prepared(engine, kind, bias=bias, is_qat=is_qat)
        # In training, a range is a moving average.
        for _ in range(16 if is_qat else 4):
            observed(torch.randn(steps, 5, 6))
        return model.eval(), tc.convert_to_reference_fx(observed.eval())

    with pytest.warns(QuantizationWarning, match=SAYS):
        model, made = converted(1)
    x = torch.randn(12, 5, 6)
    assert sqnr(model(x)[0], made(x)[0]) < (12 if is_qat else 20)
    with warnings.catch_warnings():
        warnings.simplefilter("error", QuantizationWarning)
        warnings.simplefilter("ignore", QuantizationNote)  # of what was trained
        model, made = converted(12)
    assert sqnr(model(x)[0], made(x)[0]) > (12 if is_qat else 20)


def test_steps_inside_of_the_range_of_the_bias_are_steps_that_were_seen() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LSTM(6, 8)).eval()
    weight, bias = model[0].weight_hh_l0.data, model[0].bias_hh_l0.data
    weight.mul_(0.05)[[int(bias.argmin()), int(bias.argmax())]] = 0.0
    for steps, expected in ((1, True), (2, False)):
        prepared = tc.prepare_fx(
            model, get_default_qconfig_mapping("x86"), (torch.randn(4, 3, 6),), map_all()
        )
        prepared(torch.randn(steps, 3, 6))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            tc.convert_to_reference_fx(prepared)
        assert any("single steps alone" in str(each.message) for each in told) is expected


def test_a_part_far_worse_than_the_others_is_named_with_its_profile() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LSTM(6, 64)).eval()
    with torch.no_grad():
        # One unit that counts up: its cell state determines the range that all units share.
        model[0].bias_ih_l0[64] = model[0].bias_ih_l0[0] = 200.0
        model[0].bias_ih_l0[128] = 200.0
    prepared = tc.prepare_fx(model, get_default_qconfig_mapping("x86"), (torch.randn(4, 3, 6),), map_all())
    for _ in range(3):
        prepared(torch.randn(5, 6, 6))
    with pytest.warns(QuantizationWarning, match=r"\[TQ441\]$"):
        converted = tc.convert_to_reference_fx(prepared)
    for made in (prepared, converted):
        told = {d.path.rpartition(".")[2]: d.reason for d in tc.explain(made) if "profiles" in d.reason}
        assert "igates" in told
        assert "int16_parts keeps it in 16 bits" in told["igates"]
        assert len(told) < 6
