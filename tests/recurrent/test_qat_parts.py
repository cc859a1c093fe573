"""Quantization-aware training of recurrent parts: fake-quantizes, gradients, and the converted model."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
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
from tests.helpers.oracle import MAP_LSTM, sqnr
from torchq_compat import profiles
from torchq_compat.nn import quantizable
from torchq_compat.read import observer_classes as fused_fake_quantize
from torchq_compat.recurrent_parts import get_individually_observed_parts


class Classifier(nn.Module):
    def __init__(self, recurrent: nn.Module) -> None:
        super().__init__()
        self.recurrent = recurrent
        self.fc = nn.Linear(24, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc(self.recurrent(x)[0].mean(0))
        return result


@dataclass(frozen=True)
class Kind:
    """A recurrent class; ``fake_quantizes`` is their number in a cell, for parts and weights."""

    float_class: type[nn.RNNBase]
    fake_quantizes: int
    arguments: dict[str, Any] = field(default_factory=dict)

    def make(self) -> nn.RNNBase:
        return self.float_class(8, 12, bidirectional=True, **self.arguments)


LSTM, GRU, RNN = Kind(nn.LSTM, 14), Kind(nn.GRU, 14), Kind(nn.RNN, 6)
RELU_RNN = Kind(nn.RNN, 5, {"nonlinearity": "relu"})
Profile = Callable[..., dict[str, Any]]


def with_parts(float_class: type[nn.Module], profile: Profile) -> PrepareCustomConfig:
    base: Any = getattr(quantizable, float_class.__name__)

    class UserObserved(base):  # type: ignore[misc]
        @classmethod
        def from_float(cls, module: nn.Module) -> Any:
            return get_individually_observed_parts(module, **profile(module, fake_quantize=True))

    return PrepareCustomConfig().set_float_to_observed_mapping(float_class, UserObserved)


@pytest.mark.parametrize(
    ("kind", "profile", "backend"),
    [
        *itertools.product(
            [LSTM],
            [profiles.int8_parts, profiles.int16_parts, profiles.int8_with_int16_cell],
            ["x86", "qnnpack"],
        ),
        (GRU, profiles.int8_parts, "x86"),
        (GRU, profiles.int16_parts, "qnnpack"),
        (RNN, profiles.int8_parts, "qnnpack"),
        (RELU_RNN, profiles.int8_with_int16_cell, "qnnpack"),
    ],
)
def test_training_reaches_every_weight_and_is_what_converts(
    kind: Kind, profile: Profile, backend: str
) -> None:
    config = with_parts(kind.float_class, profile)
    torch.manual_seed(0)
    x = torch.randn(4, 64, 8)
    y = (x.sum((0, 2)) > 0).long()
    # Float logits: a moving average that lags behind growing logits clips them all, and with them their
    # gradients.
    mapping = get_default_qat_qconfig_mapping(backend).set_module_name("fc", None)
    prepared = tc.prepare_qat_fx(Classifier(kind.make()).train(), mapping, (x,), config)
    for direction in ("layer_fw", "layer_bw"):
        cell = prepared.get_submodule(f"recurrent.layers.0.{direction}.cell")
        # Each part and each weight has a fake-quantize of its own.
        assert len({m for m in cell.modules() if isinstance(m, FakeQuantizeBase)}) == kind.fake_quantizes
    optimizer = torch.optim.Adam(prepared.parameters(), lr=4e-2)
    losses = []
    for _ in range(8):
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


@pytest.mark.slow
def test_explain_reports_what_a_fused_fake_quantize_cuts_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused fake-quantize does not call its observer; clipping is counted in a sample of its calls."""
    path, shares = "recurrent.layers.0.layer_fw.cell.fgate_cx_igate_cgate", []
    for every in (fused_fake_quantize.COUNTED_EVERY, 1):
        monkeypatch.setattr(fused_fake_quantize, "COUNTED_EVERY", every)
        torch.manual_seed(0)
        mapping = get_default_qat_qconfig_mapping("qnnpack")
        prepared = tc.prepare_qat_fx(
            Classifier(nn.LSTM(8, 12, bidirectional=True)).train(),
            mapping,
            (torch.randn(7, 4, 8),),
            MAP_LSTM,
        )
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
