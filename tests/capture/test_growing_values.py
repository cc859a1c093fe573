"""Values that grow with the length of the inputs: calibrated on short ones, they are cut off on long ones."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig_mapping

import torchq_compat as tc
from tests.helpers.oracle import sqnr
from torchq_compat.errors import QuantizationWarning
from torchq_compat.support.decisions import Action

MAPPING = get_default_qconfig_mapping("x86")


class Scan(nn.Module):
    """minGRU in its parallel form: sums of logarithms."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Linear(6, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden, gate = self.gates(x).chunk(2, dim=-1)
        log_coeffs, log_values = -F.softplus(gate), -F.softplus(-gate) + F.softplus(hidden).log()
        a_star = F.pad(log_coeffs.cumsum(dim=1), (0, 0, 1, 0))[:, 1:]
        return (a_star + (log_values - a_star).logcumsumexp(dim=1)).exp()


class MinGRU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scan, self.out = Scan(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.scan(x))


class Shares(nn.Module):
    """Sums of shares: they end at 1, at any length."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + torch.softmax(x, 1).cumsum(1))


def test_cumulative_values_are_told() -> None:
    torch.manual_seed(0)
    model, x = MinGRU().eval(), torch.randn(2, 8, 6)
    with pytest.warns(
        QuantizationWarning, match=r"at 'scan/add.*' is quantized.*grow with x\.size\(1\), to [12]\.\d"
    ):
        prepared = tc.prepare_fx(model, MAPPING, (x,))
    [decision] = [each for each in tc.explain(prepared) if each.code == "TQ437"]
    assert decision.action is Action.QUANTIZED
    # The reason for telling it.
    for seed in range(4):
        prepared(torch.randn(4, 8, 6, generator=torch.Generator().manual_seed(seed)))
    longer = torch.randn(4, 32, 6, generator=torch.Generator().manual_seed(9))
    assert sqnr(model(longer), tc.convert_fx(prepared)(longer)) < 10


def test_what_does_not_grow_is_not_told() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", QuantizationWarning)
        tc.prepare_fx(Shares().eval(), MAPPING, (torch.randn(2, 8, 6),))


@pytest.mark.filterwarnings("ignore::torchq_compat.errors.QuantizationWarning")
def test_suggest_leaves_them_float() -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(2, 8, 6),) for _ in range(3)]
    mapping = tc.suggest(MinGRU().eval(), MAPPING, batches[0], batches, n=1)
    assert "scan" in mapping.chosen
