"""Qparams of weights beside live FX: weights that convert observes and calibration or training did not."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx as fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import (
    FakeQuantize,
    QConfig,
    QConfigMapping,
    default_fused_act_fake_quant,
    default_fused_per_channel_wt_fake_quant,
    default_fused_wt_fake_quant,
    default_per_channel_weight_fake_quant,
    default_weight_fake_quant,
    disable_observer,
)
from torch.ao.quantization.observer import MinMaxObserver

import torchq_compat as tc
from tests.helpers.once import made_once

MIN_MAX = FakeQuantize.with_args(
    observer=MinMaxObserver, quant_min=-128, quant_max=127, dtype=torch.qint8, qscheme=torch.per_tensor_affine
)
UNFUSED = {
    "per tensor": default_weight_fake_quant,
    "per channel": default_per_channel_weight_fake_quant,
    "minimum and maximum": MIN_MAX,
}
FUSED = {
    "fused": default_fused_wt_fake_quant,
    "fused, per channel": default_fused_per_channel_wt_fake_quant,
}
PLACES = ("conv", "fc")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.fc = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.bn(self.conv(x))).mean((2, 3)))


def mapping_of(weight: Any) -> QConfigMapping:
    return QConfigMapping().set_global(QConfig(default_fused_act_fake_quant, weight))


def scales(prepared: nn.Module, side: Any) -> dict[str, Tensor]:
    """Return the scales of the weights of the converted model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        converted = side.convert_fx(copy.deepcopy(prepared).eval())
    weights = {place: converted.get_submodule(place).weight() for place in PLACES}
    return {
        place: torch.tensor(weight.q_scale()).double()
        if weight.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric)
        else weight.q_per_channel_scales()
        for place, weight in weights.items()
    }


@made_once
def prepared_on_both(name: str, *, is_qat: bool) -> tuple[list[nn.Module], list[Tensor]]:
    """Return models prepared (by us, by FX) from equal weights, which no name changes, and batches."""
    torch.manual_seed(0)
    model = Net().train(is_qat)
    batches = [torch.randn(16, 3, 8, 8) for _ in range(4)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [
            (side.prepare_qat_fx if is_qat else side.prepare_fx)(
                copy.deepcopy(model), mapping_of((UNFUSED | FUSED)[name]), (batches[0],)
            )
            for side in (tc, fx)
        ], batches


def on_both_sides(name: str, *, is_qat: bool, steps: int) -> tuple[nn.Module, nn.Module]:
    """Return models calibrated or trained (by us, by FX) from equal weights."""
    made, batches = prepared_on_both(name, is_qat=is_qat)
    for prepared in made:
        optimizer = torch.optim.SGD(prepared.parameters(), lr=0.1) if is_qat else None
        for batch in batches[:steps]:
            loss = prepared(batch).square().mean()
            if optimizer is not None:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return made[0], made[1]


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    for place in PLACES:
        torch.testing.assert_close(ours[place], theirs[place], rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", [*UNFUSED, *FUSED])
def test_calibrated_with_fake_quantizes(name: str) -> None:
    """Nothing was trained with the qparams of a fused kernel, so they are the observer's, as in FX."""
    ours, theirs = on_both_sides(name, is_qat=False, steps=2)
    found = scales(ours, tc)
    assert_equal(found, scales(theirs, fx))
    widest = ours.get_parameter("fc.weight").detach().abs().max()
    if name != "minimum and maximum":  # The other observers are symmetric.
        assert float(found["fc"].max()) == pytest.approx(float(widest) / 127.5, rel=1e-5)


@pytest.mark.parametrize("name", [*UNFUSED, *FUSED])
def test_converted_without_training(name: str) -> None:
    """A fake-quantize that never ran observes the weight at convert: a scale of 1 would make it all 0."""
    ours, theirs = on_both_sides(name, is_qat=True, steps=0)
    found = scales(ours, tc)
    assert_equal(found, scales(theirs, fx))
    assert all(float(each.max()) < 0.01 for each in found.values())


@pytest.mark.parametrize("name", UNFUSED)
def test_observers_that_are_on_look_at_the_trained_weight(name: str) -> None:
    ours, theirs = on_both_sides(name, is_qat=True, steps=4)
    found, expected = scales(ours, tc), scales(theirs, fx)
    assert_equal(found, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        frozen = scales(copy.deepcopy(ours).apply(disable_observer), tc)
        assert_equal(frozen, scales(copy.deepcopy(theirs).apply(disable_observer), fx))
    assert not torch.allclose(frozen["conv"], found["conv"], rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_kernel_converts_with_the_scale_it_trained_with(name: str) -> None:
    """Return ``max(-min / 128, max / 127)``, where FX has ``max(-min, max) / 127.5``."""
    ours, theirs = on_both_sides(name, is_qat=True, steps=4)
    found, expected = scales(ours, tc), scales(theirs, fx)
    for place in PLACES:
        ratio = found[place] / expected[place]
        assert 127.5 / 128 - 1e-5 < float(ratio.min()) <= float(ratio.max()) < 127.5 / 127 + 1e-5
        assert float((ratio - 1).abs().max()) > 1e-4
