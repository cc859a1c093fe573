"""Values that grow with the length of the inputs: calibrated on short ones, they are cut off on long ones."""

from __future__ import annotations

import copy
import operator
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


class LinearAttention(nn.Module):
    """Its sum over time is read by an addition of a number, which shares the observer of what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.out = nn.Linear(6, 24), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.gates(x).chunk(3, -1)
        query, key = F.elu(query) + 1, F.elu(key) + 1
        norm = 1 / (torch.einsum("btk,bk->bt", query, key.sum(1)) + 1e-6)
        return self.out(
            torch.einsum("btk,bkv,bt->btv", query, torch.einsum("btk,btv->bkv", key, value), norm)
        )


class Integrator(nn.Module):
    """Its state grows with each step."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.out = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.size(0), 8)
        states = []
        for t in range(x.size(1)):
            state = self.step(state, torch.sigmoid(self.inside(x[:, t])))
            states.append(state)
        return self.out(torch.stack(states, 1))

    def step(self, state: Tensor, value: Tensor) -> Tensor:
        return state + value


class Leaky(Integrator):
    """Its state grows to a bound: 1.7 times from 8 steps to 16, and 1.4 times to 32."""

    def step(self, state: Tensor, value: Tensor) -> Tensor:
        return 0.96 * state + value


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


def test_what_does_not_grow_on_is_not_told() -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", QuantizationWarning)
        for kind in (Shares, Leaky):
            tc.prepare_fx(kind().eval(), MAPPING, (torch.randn(2, 8, 6),))
        # A filter of the user raises what is told, and no other way to prepare is tried.
        with pytest.raises(QuantizationWarning, match="grow with"):
            tc.prepare_fx(Integrator().eval(), MAPPING, (torch.randn(2, 8, 6),))


@pytest.mark.parametrize(
    ("kind", "places"),
    [
        (MinGRU, ["scan"]),
        (LinearAttention, ["add_2"]),  # A call in the model's own code.
        (Integrator, ["add", "out"]),  # In the step of a loop, and behind it.
    ],
)
@pytest.mark.filterwarnings("ignore:Please use quant_min:UserWarning")
def test_suggest_leaves_them_float(kind: type[nn.Module], places: list[str]) -> None:
    torch.manual_seed(0)
    model, batches = kind().eval(), [(torch.randn(2, 8, 6),) for _ in range(3)]
    with pytest.warns(QuantizationWarning) as warned:
        mapping = tc.suggest(model, MAPPING, batches[0], batches, n=1)
    # torch.ao warns in the first test of a process.
    ours = [item.message for item in warned if isinstance(item.message, QuantizationWarning)]
    assert {message.code for message in ours} <= {"TQ437", "TQ504"}
    assert set(places) <= set(mapping.chosen)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "TQ(308|437)", QuantizationWarning)
        prepared = tc.prepare_fx(model, mapping, batches[0])
    for batch in batches:
        prepared(*batch)
    longer = torch.randn(4, 64, 6)
    assert sqnr(model(longer), tc.convert_fx(prepared)(longer)) > 25


def test_layers_in_loops_are_switched_off_at_convert() -> None:
    torch.manual_seed(0)
    model, x = Integrator().eval(), torch.randn(2, 8, 6)
    with pytest.warns(QuantizationWarning, match="grow with"):
        prepared = tc.prepare_fx(model, MAPPING, (x,))
    prepared(x)
    off = copy.deepcopy(MAPPING)
    for name in ("inside", "out"):
        off.set_module_name(name, None)
    off.set_object_type(torch.sigmoid, None).set_object_type(operator.add, None)
    converted = tc.convert_to_reference_fx(prepared, qconfig_mapping=off)
    decided = {decision.path: decision.action for decision in tc.explain(converted)}
    assert {decided[path] for path in ("inside", "sigmoid", "add", "out")} == {Action.FLOAT}
    assert "quantize" not in str(converted.get_submodule("loop.step").graph)
    assert sqnr(model(x), converted(x)) > 40
