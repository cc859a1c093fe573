"""Thresholds inside loops: one integer decides otherwise than in floats, which is told at prepare."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.nn import functional as F

import torchq_compat as tc
from torchq_compat.errors import QuantizationWarning

MAPPING = get_default_qconfig_mapping("x86")
Step = Callable[[Tensor, Tensor], Tensor]


class Loop(nn.Module):
    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step, self.fc, self.out = step, nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, states = x.new_zeros(x.size(0), 8), []
        for t in range(x.size(1)):
            h = self.step(self.fc(x[:, t]), h)
            states.append(h)
        return self.out(torch.stack(states, 1))


def _spikes(x: Tensor, h: Tensor) -> Tensor:
    v = 0.9 * h + x
    return v - (v > 1.0).float()


def _rounds(x: Tensor, h: Tensor) -> Tensor:
    update = torch.round(torch.sigmoid(x))
    return update * x + (1 - update) * 0.5 * h


def _rounds_a_state(x: Tensor, h: Tensor) -> Tensor:
    return x + 0.5 * torch.round(h)


def _chooses(x: Tensor, h: Tensor) -> Tensor:
    return 0.5 * h + F.one_hot(x.argmax(-1), 8).float()


def _is_piecewise(x: Tensor, h: Tensor) -> Tensor:
    return 0.5 * h + 0.5 * torch.where(x >= 0, x + 0.5, x.sigmoid())


class Masked(nn.Module):
    """Its mask is of the input, which has the shape of what each step returns."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.RNNCell(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h, results = x.new_zeros(x.size(0), 6), []
        for t in range(x.size(1)):
            h = self.cell((x[:, t] > 0).float() * x[:, t], h)
            results.append(self.out(h))
        return torch.stack(results, 1)


@pytest.mark.parametrize(
    ("step", "op"),
    [
        (_spikes, "gt.Scalar"),
        (_rounds, "round.default"),
        (_rounds_a_state, "round.default"),
        (_chooses, "argmax.default"),
    ],
)
def test_what_jumps_in_a_loop_is_told(step: Step, op: str) -> None:
    with pytest.warns(QuantizationWarning, match=r"later steps .*\[TQ442\]$"):
        prepared = tc.prepare_fx(Loop(step).eval(), MAPPING, (torch.randn(2, 7, 6),))
    assert [item.kind for item in tc.explain(prepared) if item.code == "TQ442"] == [op]


def test_a_function_of_pieces_and_a_mask_are_not_told() -> None:
    settings = tc.get_default_prepare_custom_config()
    for model in (Loop(_is_piecewise), Masked()):
        with warnings.catch_warnings():
            warnings.simplefilter("error", QuantizationWarning)
            prepared = tc.prepare_fx(model.eval(), MAPPING, (torch.randn(2, 7, 6),), settings)
        assert hasattr(prepared, "loop")
