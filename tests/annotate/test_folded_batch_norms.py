"""A ReLU behind a batch norm that is folded: whose QConfig decides, against FX run live."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import QConfigMapping, get_default_qconfig

import torchq_compat as tc
from tests.helpers.once import made_once
from tests.helpers.oracle import by_fx, calibrate, sqnr


class Block(nn.Module):
    def __init__(self, layer: nn.Module, channels: int, relu: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.norm, self.act, self.relu = layer, nn.BatchNorm1d(channels), nn.ReLU(), relu

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.layer(x))
        return self.act(x) if self.relu is nn.ReLU else self.relu(x)


@made_once
def linear_block(*, is_functional: bool) -> tuple[nn.Module, Tensor]:
    return Block(nn.Linear(8, 8), 8, F.relu if is_functional else nn.ReLU).eval(), torch.randn(64, 8)


def mapping(*kinds: Any) -> QConfigMapping:
    found = QConfigMapping()
    for kind in kinds:
        found.set_object_type(kind, get_default_qconfig("fbgemm"))
    return found


@pytest.mark.parametrize(
    ("kinds", "relu", "quantizes"),
    [
        ((nn.Linear,), nn.ReLU, False),
        ((nn.Linear,), F.relu, False),
        ((nn.Linear, F.relu), F.relu, True),
        ((nn.Linear, nn.ReLU), nn.ReLU, True),
        ((nn.Linear, nn.BatchNorm1d), F.relu, False),
        # FX asks for the functional relu: no fused module with an nn.ReLU stands in its place.
        ((nn.Linear, nn.ReLU), F.relu, False),
    ],
)
def test_a_linear_with_a_folded_batch_norm_is_not_fused_with_its_relu(
    kinds: tuple[Any, ...], relu: Any, quantizes: bool
) -> None:
    model, x = linear_block(is_functional=relu is F.relu)
    _, theirs = by_fx(model, mapping(*kinds), [(x,)])
    prepared = tc.prepare_fx(model, mapping(*kinds), (x,))
    calibrate(prepared, [(x,)])
    ours = tc.convert_to_reference_fx(prepared)
    step = float(model(x).max()) / 255
    assert float((ours(x) - theirs(x)).abs().max()) <= 1.01 * step
    assert (sqnr(model(x), theirs(x)) < 60) is quantizes
    assert (sqnr(model(x), ours(x)) < 60) is quantizes


def test_a_convolution_is_fused_with_batch_norm_and_relu() -> None:
    """Here FX wants one QConfig for all three, and so it is here."""
    model, x = Block(nn.Conv1d(4, 4, 3), 4, nn.ReLU).eval(), torch.randn(4, 4, 16)
    with pytest.raises(LookupError, match="same qconfigs for all module types"):
        by_fx(model, mapping(nn.Conv1d), [(x,)])
    with pytest.raises(tc.errors.ConfigError, match="'layer' starts the fused pattern Conv1d"):
        tc.prepare_fx(model, mapping(nn.Conv1d), (x,))
