"""Quantization-aware training of LSTM parts: fake-quants, gradients, and what is converted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import (
    FakeQuantizeBase,
    disable_fake_quant,
    disable_observer,
    get_default_qat_qconfig_mapping,
)
from torch.ao.quantization.fx.custom_config import PrepareCustomConfig

import torchq_compat as tc
from tests.oracle import MAP_LSTM, sqnr
from torchq_compat import profiles
from torchq_compat.lstm_utils import get_lstm_with_individually_observed_parts
from torchq_compat.specs import fused_fake_quantize


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 12, bidirectional=True)
        self.fc = nn.Linear(24, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc(self.lstm(x)[0].mean(0))
        return result


def with_parts(constructors: dict[str, Any]) -> PrepareCustomConfig:
    class UserLSTM(torch.ao.nn.quantizable.LSTM):
        @classmethod
        def from_float(cls, float_lstm: nn.LSTM) -> Any:
            return get_lstm_with_individually_observed_parts(float_lstm, **constructors)

    return PrepareCustomConfig().set_float_to_observed_mapping(nn.LSTM, UserLSTM)


CONFIGS = {
    "default": MAP_LSTM,
    "int16_parts": with_parts(profiles.int16_parts(fake_quantize=True)),
    "int8_with_int16_cell": with_parts(profiles.int8_with_int16_cell(fake_quantize=True)),
}


@pytest.mark.parametrize("backend", ["x86", "qnnpack"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_training_reaches_every_weight_and_is_what_converts(
    config: PrepareCustomConfig, backend: str
) -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 64, 8)
    y = (x.sum((0, 2)) > 0).long()
    # Float logits: a moving average that lags behind growing logits clips them all, and their gradients.
    mapping = get_default_qat_qconfig_mapping(backend).set_module_name("fc", None)
    prepared = tc.prepare_qat_fx(Classifier().train(), mapping, (x,), config)
    for direction in ("layer_fw", "layer_bw"):
        cell = prepared.get_submodule(f"lstm.layers.0.{direction}.cell")
        # Twelve parts and two weights, each with a fake-quantize of its own.
        assert len({m for m in cell.modules() if isinstance(m, FakeQuantizeBase)}) == 14
    optimizer = torch.optim.Adam(prepared.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = F.cross_entropy(prepared(x), y)
        loss.backward()
        assert all(p.grad is not None and float(p.grad.abs().max()) > 0 for p in prepared.parameters())
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < 0.8 * losses[0]
    prepared.apply(disable_observer).eval()
    converted = tc.convert_fx(prepared)
    with torch.no_grad():
        trained, found = prepared(x), converted(x)
    assert sqnr(trained, found) > 30
    with torch.no_grad():
        prepared.apply(disable_fake_quant)
        assert sqnr(prepared(x), converted(x)) < 60
    assert all(b.dtype is torch.int8 for n, b in converted.named_buffers() if "frozen_param" in n)


def test_explain_reports_what_a_fused_fake_quantize_cuts_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused fake-quantize does not call its observer; a sample of its calls is counted."""
    path, shares = "lstm.layers.0.layer_fw.cell.fgate_cx_igate_cgate", []
    for every in (fused_fake_quantize.COUNTED_EVERY, 1):
        monkeypatch.setattr(fused_fake_quantize, "COUNTED_EVERY", every)
        torch.manual_seed(0)
        mapping = get_default_qat_qconfig_mapping("qnnpack")
        prepared = tc.prepare_qat_fx(Classifier().train(), mapping, (torch.randn(7, 4, 8),), MAP_LSTM)
        assert "saturated" not in tc.explain(prepared).find(path)[0].details
        for _ in range(20):
            prepared(torch.randn(50, 4, 8))
        found = [
            tc.explain(m).find(path)[0].details["saturated"] for m in (prepared, tc.convert_fx(prepared))
        ]
        assert found[0] == found[1]
        shares.append(found[0])
    assert shares[1] > 0.01
    assert shares[0] == pytest.approx(shares[1], rel=0.2)
