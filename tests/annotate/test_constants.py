"""Ops that compute with sizes and constants alone stay float: FX evaluates them while it traces."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import get_default_qat_qconfig_mapping, get_default_qconfig_mapping

import torchq_compat as tc
from tests.helpers.oracle import (
    activation_qparams,
    by_fx,
    by_us,
    fx_activation_qparams,
    op_decisions,
    sqnr,
)
from torchq_compat.support.decisions import Action

MAPPING = get_default_qconfig_mapping("x86")
REASON = "it computes with sizes and constants alone"


class BufferAlone(nn.Module):
    """A table that is scaled in ``forward``, to a range that 8 bits would ruin."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("table", torch.randn(8) * 0.01)
        self.table[0] = 40.0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shifts = torch.cat([self.table[:4] * 2, self.table[4:] + 1])
        return self.linear(x) + x, shifts


class Literal(nn.Module):
    """A matrix that is made of literals, and inverted."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return torch.linalg.solve(torch.eye(8) * 0.37 + torch.ones(8, 8) * 0.01, y.mT).mT


class Rotary(nn.Module):
    """Rotary angles of positions from 0 to the length, as language models have them: FX cannot trace it."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("frequencies", 100 ** -(torch.arange(0, 16, 2) / 16), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1]).float()
        angles = positions[:, None] @ self.frequencies[None]
        angles = torch.cat((angles, angles), dim=-1)
        query, key = (self._turned(y, angles) for y in (self.query(x), self.key(x)))
        return query @ key.mT

    @staticmethod
    def _turned(x: Tensor, angles: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()


class Kept(nn.Module):
    """What is no constant: a parameter, a buffer that ``forward`` writes, a module called on a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(8))
        self.linear = nn.Linear(8, 8)
        self.register_buffer("table", torch.randn(3, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * (self.scale * self.scale), self.linear(self.table)


class Written(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("last", torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        doubled = self.last + self.last
        self.last.copy_(x.mean(0))
        return self.linear(x) * doubled


@pytest.mark.parametrize("make", [BufferAlone, Literal])
def test_as_fx(make: type[nn.Module]) -> None:
    model, batches = make().eval(), [(torch.randn(6, 8),) for _ in range(3)]
    theirs = by_fx(model, MAPPING, batches)[1]
    ours = by_us(model, MAPPING, batches)[1]
    assert activation_qparams(ours) == fx_activation_qparams(theirs)
    given = batches[0][0]
    for mine, its, exact in zip(*(_results(m, given) for m in (ours, theirs, model)), strict=True):
        assert sqnr(exact, mine) >= sqnr(exact, its) - 1
    assert any(d.reason == REASON for d in tc.explain(ours))


def test_angles_keep_their_digits() -> None:
    """96 positions in 8 bits are a step of 0.37 radians, and the result has 10 dB."""
    model, batches = Rotary().eval(), [(torch.randn(2, 96, 16),) for _ in range(2)]
    converted = by_us(model, MAPPING, batches)[1]
    for given in (batches[0][0], torch.randn(1, 41, 16)):
        assert 21 < sqnr(model(given), converted(given)) < 40
    joined, *others = [d for d in op_decisions(converted) if d.kind.startswith("cat")]
    assert (joined.action, joined.reason) == (Action.FLOAT, REASON)
    assert [d.action for d in others] == [Action.SHARED] * 2


def test_the_trained_form_is_the_same() -> None:
    model = Rotary().train()
    given = torch.randn(2, 96, 16)
    prepared = tc.prepare_qat_fx(model, get_default_qat_qconfig_mapping("x86"), (given,))
    assert any(d.reason == REASON for d in tc.explain(prepared))
    assert 25 < sqnr(model(given), prepared(given)) < 60


@pytest.mark.parametrize(("make", "kind"), [(Kept, "mul.Tensor"), (Kept, "Linear"), (Written, "add.Tensor")])
def test_what_is_no_constant_is_quantized(make: type[nn.Module], kind: str) -> None:
    converted = by_us(make().eval(), MAPPING, [(torch.randn(6, 8),)])[1]
    found = [d for d in op_decisions(converted) if d.kind == kind]
    assert found
    assert all(d.action is not Action.FLOAT for d in found), found


def _results(model: nn.Module, given: Tensor) -> tuple[Tensor, ...]:
    with torch.no_grad():
        result = model(given)
    return result if isinstance(result, tuple) else (result,)
