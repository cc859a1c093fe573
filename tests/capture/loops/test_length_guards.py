"""Decisions of Python's by sizes in a model with a rolled loop: right, or refused where they change."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import QConfigMapping
from torch.ao.quantization.fx.custom_config import PrepareCustomConfig

import torchq_compat as tc
from torchq_compat.errors import InputError, QuantizationWarning

Body = Callable[[nn.Linear, Tensor], Tensor]
#: (batch, length) of the calls; the example has (3, 7).
SIZES = [(3, 1), (3, 4), (3, 12), (3, 20), (4, 41), (5, 7), (1, 7), (8, 20), (5, 5), (2, 100)]


def _loop(linear: nn.Linear, x: Tensor) -> Tensor:
    h, states = torch.zeros_like(x[:, 0]), []
    for t in range(x.size(1)):
        h = torch.tanh(linear(x[:, t] + h))
        states.append(h)
    return torch.stack(states, 1)


def _by_length(linear: nn.Linear, x: Tensor) -> Tensor:
    return _loop(linear, x) * (2 if x.size(1) > 40 else 3)


def _by_batch_behind(linear: nn.Linear, x: Tensor) -> Tensor:
    y = _loop(linear, x)
    return y * 2 if y.size(0) > 4 else y - 1


def _by_product_behind(linear: nn.Linear, x: Tensor) -> Tensor:
    y = _loop(linear, x).reshape(-1, 6)
    return y * 2 if y.size(0) > 40 else y - 1


def _in_the_step(linear: nn.Linear, x: Tensor) -> Tensor:
    h, states = torch.zeros_like(x[:, 0]), []
    for t in range(x.size(1)):
        h = torch.tanh(linear(x[:, t] + h))
        if t == x.size(1) - 1 and h.size(0) > 4:
            h = h * 0.5
        states.append(h)
    return torch.stack(states, 1)


def _unlike_short_ones(linear: nn.Linear, x: Tensor) -> Tensor:
    y = _loop(linear, x)
    return y if x.size(1) > 3 else y + 1


def _by_every_second(linear: nn.Linear, x: Tensor) -> Tensor:
    y = _loop(linear, x)[:, ::2]
    return y * 2 if y.size(1) > 20 else y - 1


def _unlike_first_steps(linear: nn.Linear, x: Tensor) -> Tensor:
    h = torch.zeros_like(x[:, 0])
    for t in range(x.size(1)):
        h = torch.tanh(linear(x[:, t] + h)) * (0.5 if t < 2 else 1.0)
    return h


class Model(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.linear, self.body = nn.Linear(6, 6), body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.linear, x)


@pytest.mark.parametrize(
    ("body", "limit", "refused"),
    [
        (_by_length, "x.size(1) <= 40", {(4, 41), (2, 100)}),
        (_by_batch_behind, "it is 1 to 4", {(5, 7), (8, 20), (5, 5)}),
        (_by_product_behind, "it is 1 to 5", {(3, 20), (4, 41), (8, 20), (2, 100)}),
        (_in_the_step, "it is 1 to 4", {(5, 7), (8, 20), (5, 5)}),
        (_unlike_short_ones, "x.size(1) > 3", {(3, 1)}),
        (_unlike_first_steps, "it is at least 2", {(3, 1)}),
        (_by_every_second, "written out", {*SIZES} - {(5, 7), (1, 7)}),
    ],
)
def test_right_or_refused(body: Body, limit: str, refused: set[tuple[int, int]]) -> None:
    model = Model(body).eval()
    with pytest.warns(QuantizationWarning, match=r"TQ60[12]"):
        prepared = tc.prepare_fx(model, QConfigMapping(), (torch.randn(3, 7, 6),))
    assert any(limit in decision.reason for decision in tc.explain(prepared).decisions)
    for size in SIZES:
        x = torch.randn(*size, 6)
        if size in refused:
            with pytest.raises(InputError):
                prepared(x)
        else:
            torch.testing.assert_close(prepared(x), model(x), rtol=1e-5, atol=1e-5)


def test_a_decision_that_always_holds_is_not_warned_about() -> None:
    model = Model(lambda linear, x: _loop(linear, x) if x.size(1) > 0 else x).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepared = tc.prepare_fx(model, QConfigMapping(), (torch.randn(3, 7, 6),))
    x = torch.randn(2, 20, 6)
    torch.testing.assert_close(prepared(x), model(x), rtol=1e-5, atol=1e-5)


class Own(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, ::2] * 2


class DecidesByOwn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.own = nn.Linear(6, 6), Own()

    def forward(self, x: Tensor) -> Tensor:
        y = self.own(_loop(self.linear, x))
        return y * 2 if y.size(0) > 4 else y - 1


def test_a_decision_by_a_size_that_a_custom_module_computes() -> None:
    model = DecidesByOwn().eval()
    config = PrepareCustomConfig().set_non_traceable_module_classes([Own])
    with pytest.warns(QuantizationWarning, match="free: as long as it is 1 to 4"):
        prepared = tc.prepare_fx(model, QConfigMapping(), (torch.randn(3, 7, 6),), config)
    for size in [(3, 7), (3, 12), (1, 2), (4, 5)]:
        x = torch.randn(*size, 6)
        torch.testing.assert_close(prepared(x), model(x), rtol=1e-5, atol=1e-5)
    with pytest.raises(InputError, match="size 5 in dimension 0"):
        prepared(torch.randn(5, 7, 6))
