"""Calibration with single steps only: a hidden projection is never seen, which convert warns about."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization import get_default_qat_qconfig_mapping, get_default_qconfig_mapping

import torchq_compat as tc
from tests.helpers.oracle import sqnr
from tests.helpers.packed_models import map_all
from torchq_compat.errors import QuantizationWarning

SAYS = r"'0' was calibrated with single steps alone"


def converted(
    engine: str, kind: Any, steps: int, *, bias: bool, is_qat: bool = False
) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(kind(6, 8, bias=bias))
    mapping = (get_default_qat_qconfig_mapping if is_qat else get_default_qconfig_mapping)(engine)
    prepare = tc.prepare_qat_fx if is_qat else tc.prepare_fx
    prepared = prepare(model.train(is_qat), mapping, (torch.randn(4, 3, 6),), map_all())
    for _ in range(4):
        prepared(torch.randn(steps, 5, 6))
    return model.eval(), tc.convert_to_reference_fx(prepared.eval())


@pytest.mark.parametrize(
    ("engine", "kind", "bias", "is_qat"),
    [("x86", nn.LSTM, True, False), ("qnnpack", nn.GRU, False, False), ("x86", nn.RNN, True, True)],
)
def test_single_steps(engine: str, kind: Any, bias: bool, is_qat: bool) -> None:
    with pytest.warns(QuantizationWarning, match=SAYS):
        model, made = converted(engine, kind, 1, bias=bias, is_qat=is_qat)
    x = torch.randn(12, 5, 6)
    assert sqnr(model(x)[0], made(x)[0]) < (12 if is_qat else 20)
    with warnings.catch_warnings():
        warnings.simplefilter("error", QuantizationWarning)
        model, made = converted(engine, kind, 12, bias=bias, is_qat=is_qat)
    assert sqnr(model(x)[0], made(x)[0]) > (12 if is_qat else 20)


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
    for made in (prepared, tc.convert_to_reference_fx(prepared)):
        told = {d.path.rpartition(".")[2]: d.reason for d in tc.explain(made) if "profiles" in d.reason}
        assert "igates" in told
        assert "int16_parts keeps it in 16 bits" in told["igates"]
        assert len(told) < 6
