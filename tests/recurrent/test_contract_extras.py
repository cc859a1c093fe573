"""The corners of the contract of recurrent modules: packed sequences, float64, cells, sharing, dropout."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.ao.quantization.fx.custom_config import PrepareCustomConfig
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import torchq_compat as tc
from tests.helpers.lstm_flow import uniform
from tests.helpers.once import made_once
from tests.helpers.oracle import MAP_LSTM, by_us, leaves, sqnr
from torchq_compat.errors import InputError, TorchQCompatError
from torchq_compat.nn import quantizable

MAPPING = get_default_qconfig_mapping("qnnpack")
MAP_CELL = PrepareCustomConfig().set_float_to_observed_mapping(nn.LSTMCell, torch.ao.nn.quantizable.LSTMCell)


class Whole(nn.Module):
    def __init__(self, lstm: nn.Module) -> None:
        super().__init__()
        self.lstm = lstm

    def forward(self, x: Tensor) -> Any:
        return self.lstm(x)


def wide(module: nn.Module) -> nn.Module:
    """Return ``module`` with weights large enough that its states use their range."""
    for parameter in module.parameters():
        parameter.data *= 2.5
    return module


RELU_RNN = functools.partial(nn.RNN, nonlinearity="relu")


@made_once
def stages(make: Callable[..., nn.RNNBase], bidirectional: bool) -> tuple[nn.Module, nn.Module, nn.Module]:
    """Return the float, the prepared and the converted module, of a model of two layers.

    All tests call the prepared one, so its observers see more than the converted one was made from."""
    recurrent = make(8, 12, 2, bidirectional=bidirectional)
    model = Whole(wide(recurrent) if make is not RELU_RNN else recurrent).eval()
    observed: Any = getattr(quantizable, type(recurrent).__name__)
    config = PrepareCustomConfig().set_float_to_observed_mapping(type(recurrent), observed)
    prepared, converted = by_us(model, MAPPING, [(uniform(1.7, 9, 48, 8),) for _ in range(6)], config)
    return model.lstm, prepared.lstm, converted.lstm


@pytest.mark.parametrize(
    ("make", "bidirectional", "with_state", "enforce_sorted"),
    [
        *itertools.product([nn.LSTM], [True, False], [True, False], [True, False]),
        *itertools.product([nn.GRU, nn.RNN, RELU_RNN], [True], [True, False], [False]),
    ],
)
def test_packed_sequences_go_through_the_modules_themselves(
    make: Callable[..., nn.RNNBase], bidirectional: bool, with_state: bool, enforce_sorted: bool
) -> None:
    recurrent, prepared, converted = stages.itself(make, bidirectional)
    lengths = [7, 5, 5, 1] if enforce_sorted else [5, 7, 1, 5]
    packed = pack_sequence([uniform(1.7, n, 8) for n in lengths], enforce_sorted=enforce_sorted)
    rows = 4 if bidirectional else 2
    states = [torch.rand(rows, 4, 12) - 0.5 for _ in range(2 if make is nn.LSTM else 1)]
    state = (tuple(states) if make is nn.LSTM else states[0]) if with_state else None
    exact = leaves(recurrent(packed, state)[1])
    data = recurrent(packed, state)[0].data
    for module, low, high in ((prepared, 100, float("inf")), (converted, 25, 60)):
        output, last = module(packed, state)
        assert isinstance(output, PackedSequence)
        assert torch.equal(output.batch_sizes, packed.batch_sizes)
        for a, b in zip((data, *exact), (output.data, *leaves(last)), strict=True):
            assert a.shape == b.shape
            assert low < sqnr(a, b) <= high


def test_a_packed_sequence_as_input_of_a_model_is_refused_clearly() -> None:
    with pytest.raises(InputError, match="PackedSequence") as caught:
        tc.prepare_fx(Whole(nn.LSTM(8, 12)), MAPPING, (pack_sequence([torch.randn(3, 8)]),), MAP_LSTM)
    assert "Hint:" in str(caught.value)


def test_float64() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), wide(nn.LSTM(8, 12))).eval().double()
    data = [(torch.randn(9, 6, 8, dtype=torch.float64),) for _ in range(4)]
    prepared, converted = by_us(model, MAPPING, data, MAP_LSTM)
    x = torch.randn(5, 3, 8, dtype=torch.float64)
    for exact, observed, found in zip(*(leaves(m(x)) for m in (model, prepared, converted)), strict=True):
        assert exact.dtype is observed.dtype is found.dtype is torch.float64
        assert float((exact - observed).abs().max()) < 1e-5
        assert 25 < sqnr(exact, found) < 60


class CellTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = wide(nn.LSTMCell(8, 12))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        state = self.cell(x)
        h, c = self.cell(x * 0.5, state)
        return h, c


@pytest.mark.parametrize("batched", [True, False])
def test_a_single_cell(batched: bool) -> None:
    torch.manual_seed(0)
    model = CellTwice().eval()
    shape = (64, 8) if batched else (8,)
    data = [(torch.randn(shape),) for _ in range(4 if batched else 64)]
    prepared, converted = by_us(model, MAPPING, data, MAP_CELL)
    assert isinstance(prepared.cell, torch.ao.nn.quantizable.LSTMCell)
    assert len([n for n in converted.graph.nodes if n.op == "call_module"]) == 2
    stacked = [
        [torch.stack(t) for t in zip(*(m(*d) for d in data), strict=True)]
        for m in (model, prepared, converted)
    ]
    for exact, observed, found in zip(*stacked, strict=True):
        assert float((exact - observed).abs().max()) < 1e-5
        assert 25 < sqnr(exact, found) < 60
    with pytest.raises(TorchQCompatError, match="the input must be"):
        prepared.cell(torch.randn(2, 3))


def test_an_alias_is_one_set_of_parameters_and_observers() -> None:
    class Aliased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = wide(nn.LSTM(8, 8))
            self.b = self.a

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.b(self.a(x)[0])[0]
            return y

    torch.manual_seed(0)
    model = Aliased().eval()
    prepared, converted = by_us(model, MAPPING, [(torch.randn(9, 6, 8),) for _ in range(6)], MAP_LSTM)
    assert {
        n.target for n in prepared.graph.nodes if n.op == "call_module" and "post_process" not in n.target
    } == {"a"}
    assert sum(p.numel() for p in prepared.parameters()) == sum(p.numel() for p in model.parameters())
    x = torch.randn(5, 3, 8)
    assert 25 < sqnr(model(x), converted(x)) < 60


def test_dropout_between_layers_in_training_only() -> None:
    torch.manual_seed(0)
    model = Whole(nn.LSTM(8, 12, 2, dropout=1.0)).eval()
    prepared = tc.prepare_fx(model, MAPPING, (torch.randn(5, 2, 8),), MAP_LSTM)
    x, other = torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    torch.testing.assert_close(prepared(x)[0], model(x)[0], atol=1e-5, rtol=0)
    prepared.train()
    # All of layer 1's output is dropped, so what layer 2 computes does not depend on the input.
    torch.testing.assert_close(prepared(x)[0], prepared(other)[0])
    torch.testing.assert_close(prepared(x)[0], model.train()(x)[0], atol=1e-5, rtol=0)
    prepared.eval()
    assert not torch.equal(prepared(x)[0], prepared(other)[0])
