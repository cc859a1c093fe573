"""Buffers that ``forward`` updates from their old values stay float; FX drops the writes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx as fx
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig_mapping

import torchq_compat as tc
from tests.helpers.oracle import sqnr

CALIBRATED, BATCHES = 6, 40


class Updating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.back = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("state", torch.zeros(4))
        self.state: Tensor


class Counter(Updating):
    def forward(self, x: Tensor) -> Tensor:
        self.state.add_(1)
        result: Tensor = self.fc(x) / self.state
        return result


class Average(Updating):
    def forward(self, x: Tensor) -> Tensor:
        self.state.mul_(0.99).add_(0.01 * (x + 1).mean(0))
        result: Tensor = self.fc(x - self.state)
        return result


class Sum(Updating):
    def forward(self, x: Tensor) -> Tensor:
        self.state = self.state + x.abs().sum(0)
        result: Tensor = self.fc(x) / self.state
        return result


class Twice(Updating):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            self.state += 0.5
        result: Tensor = self.fc(x) / self.state
        return result


class Cell(Updating):
    """Its state is data: it goes through a weight."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.fc(x) + self.back(self.state))
        self.state.copy_(hidden[-1])
        return hidden


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(8, 4, generator=generator) for _ in range(BATCHES)]


def quantized(model: nn.Module, engine: Any) -> tuple[nn.Module, nn.Module]:
    """Return the reference and the lowered model, calibrated on the first batches."""
    prepared = engine.prepare_fx(copy.deepcopy(model), get_default_qconfig_mapping("x86"), (batches()[0],))
    for x in batches()[:CALIBRATED]:
        prepared(x)
    lowered: nn.Module = engine.convert_fx(copy.deepcopy(prepared))
    reference: nn.Module = engine.convert_to_reference_fx(prepared)
    return reference, lowered


@pytest.mark.parametrize("family", [Counter, Average, Sum, Twice])
def test_a_buffer_counts_on_beyond_the_calibrated_range(family: type[Updating]) -> None:
    torch.manual_seed(0)
    model = family().eval()
    for converted in quantized(model, tc):
        updates = [each for each in tc.explain(converted) if "'state'" in each.reason]
        assert updates
        assert all(each.action == "float" for each in updates)
        exact = copy.deepcopy(model)
        for x in batches()[:CALIBRATED]:
            exact(x)
        found = [(exact(x), converted(x)) for x in batches()[CALIBRATED:]]
        state = dict(converted.named_buffers())["state"]
        torch.testing.assert_close(state, exact.state)
        whole = sqnr(torch.cat([a for a, _ in found]), torch.cat([b for _, b in found]))
        assert 20 < whole < 60


def test_fx_drops_the_writes() -> None:
    torch.manual_seed(0)
    reference, _ = quantized(Counter().eval(), fx)
    before = {name: value.clone() for name, value in reference.named_buffers()}
    reference(batches()[0])
    assert all(torch.equal(value, before[name]) for name, value in reference.named_buffers())


def test_a_state_behind_a_weight_is_quantized() -> None:
    torch.manual_seed(0)
    model = Cell().eval()
    for converted in quantized(model, tc):
        assert not [each for each in tc.explain(converted) if "'state'" in each.reason]
        exact = copy.deepcopy(model)
        for x in batches()[:CALIBRATED]:
            exact(x)
        found = [(exact(x), converted(x)) for x in batches()[CALIBRATED:]]
        assert 20 < sqnr(torch.cat([a for a, _ in found]), torch.cat([b for _, b in found])) < 60
