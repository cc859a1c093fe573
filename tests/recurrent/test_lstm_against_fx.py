"""LSTM models beside FX where FX is right: the accuracy, and the qparams of every corresponding observer."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import float_qparams_weight_only_qconfig, get_default_qconfig_mapping
from torch.fx import GraphModule

from tests.helpers.oracle import (
    MAP_LSTM,
    activation_qparams,
    by_fx,
    by_us,
    fx_activation_qparams,
    leaves,
    sqnr,
)
from torchq_compat import explain
from torchq_compat.support.decisions import Report

INPUTS, HIDDEN = 12, 16
BACKENDS = ("x86", "qnnpack")
OBSERVED_PARTS = (
    "igates",
    "hgates",
    "gates",
    "fgate_cx",
    "igate_cgate",
    "fgate_cx_igate_cgate",
    "ogate_cy",
)
FIXED_PARTS = ("input_gate", "forget_gate", "cell_gate", "output_gate")


@dataclass(frozen=True)
class Variant:
    """One way to build and quantize the LSTM model."""

    backend: str
    num_layers: int
    batch_first: bool
    bias: bool

    def __str__(self) -> str:
        flags = f"{'-batch_first' * self.batch_first}{'-no_bias' * (not self.bias)}"
        return f"{self.backend}-{self.num_layers}{flags}"

    def batch(self, steps: int, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.randn((batch, steps, INPUTS) if self.batch_first else (steps, batch, INPUTS))
        h, c = (0.5 * torch.randn(self.num_layers, batch, HIDDEN) for _ in range(2))
        return x, h, c


#: Three of the four settings are in every combination: no code asks for more than two of them.
VARIANTS = [
    Variant(backend, num_layers, batch_first, bias)
    for backend, num_layers, batch_first, bias in itertools.product(
        BACKENDS, (1, 2), (False, True), (True, False)
    )
    if (backend == "x86") ^ (num_layers == 2) ^ batch_first ^ bias
]


class Encoder(nn.Module):
    """An LSTM between quantized ops, with every result used."""

    def __init__(self, variant: Variant) -> None:
        super().__init__()
        self.inp = nn.Linear(INPUTS, HIDDEN)
        self.lstm = nn.LSTM(
            HIDDEN, HIDDEN, variant.num_layers, bias=variant.bias, batch_first=variant.batch_first
        )
        self.skip = nn.Linear(INPUTS, HIDDEN)
        self.out = nn.Linear(HIDDEN, 5)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, (h_n, c_n) = self.lstm(torch.relu(self.inp(x)), (h, c))
        return self.out(torch.relu(y + self.skip(x))), h_n, c_n


@dataclass(frozen=True)
class Both:
    """One float model quantized twice, with the same calibration batches."""

    variant: Variant
    model: nn.Module
    ours: GraphModule
    fx_prepared: GraphModule
    theirs: GraphModule
    report: Report


@pytest.fixture(scope="module", params=VARIANTS, ids=str)
def both(request: pytest.FixtureRequest) -> Both:
    variant: Variant = request.param
    torch.manual_seed(0)
    model = Encoder(variant).eval()
    mapping = get_default_qconfig_mapping(variant.backend)
    batches = [variant.batch(steps=3, batch=40) for _ in range(2)]
    _, ours = by_us(model, mapping, batches, MAP_LSTM)
    fx_prepared, theirs = by_fx(model, mapping, batches, MAP_LSTM)
    return Both(variant, model, ours, fx_prepared, theirs, explain(ours))


@pytest.mark.parametrize(("steps", "batch"), [(11, 3), (1, 20)])
def test_no_less_accurate_than_fx_at_sizes_never_prepared(both: Both, steps: int, batch: int) -> None:
    torch.manual_seed(1)
    args = both.variant.batch(steps, batch)
    with torch.no_grad():
        results = [leaves(run(*args)) for run in (both.model, both.ours, both.theirs)]
    for exact, mine, fx_result in zip(*results, strict=True):
        assert sqnr(exact, mine) >= sqnr(exact, fx_result) - 0.5
        # With x86's reduced range there are half the levels of qnnpack, which costs 6 dB.
        assert (16 if both.variant.backend == "x86" else 24) < sqnr(exact, mine) < 60


def test_qparams_of_the_outer_graph_equal(both: Both) -> None:
    assert activation_qparams(both.ours) == fx_activation_qparams(both.theirs)
    # x, h, c; inp, relu, skip, add-relu, out.
    assert len(activation_qparams(both.ours)) == 8


@pytest.mark.parametrize("part", OBSERVED_PARTS)
def test_qparams_of_a_part_equal(both: Both, part: str) -> None:
    for layer in range(both.variant.num_layers):
        path = f"lstm.layers.{layer}.layer_fw.cell.{part}"
        observer = both.fx_prepared.get_submodule(f"{path}.activation_post_process")
        scale, zero_point = observer.calculate_qparams()
        (decision,) = both.report.find(path)
        assert decision.details["scale"] == pytest.approx(float(scale), rel=1e-6)
        assert decision.details["zero_point"] == int(zero_point)
        assert decision.details["dtype"] is torch.uint8


@pytest.mark.parametrize("part", FIXED_PARTS)
def test_qparams_of_sigmoid_and_tanh_are_fixed_as_in_fx(both: Both, part: str) -> None:
    for layer in range(both.variant.num_layers):
        path = f"lstm.layers.{layer}.layer_fw.cell.{part}"
        # FX has no observer there: the quantized kernel defines the qparams.
        gate = both.theirs.get_submodule(path)
        activated = gate(torch.quantize_per_tensor(torch.randn(2, 3), 0.05, 128, torch.quint8))
        expected = (activated.q_scale(), activated.q_zero_point())
        assert expected == ((1 / 128, 128) if part == "cell_gate" else (1 / 256, 0))
        (decision,) = both.report.find(path)
        assert (decision.details["scale"], decision.details["zero_point"]) == expected


def test_folded_weights_of_the_cells_equal(both: Both) -> None:
    """FX packs them in torch.ao.nn.quantized.Linear, per channel if the qconfig says so."""
    for layer in range(both.variant.num_layers):
        path = f"lstm.layers.{layer}.layer_fw.cell"
        cell = both.ours.get_submodule(path)
        weights = [value for value in cell.buffers() if value.dtype is torch.int8]
        assert len(weights) == 2
        for name, weight in zip(("igates", "hgates"), weights, strict=True):
            fx_weight = both.theirs.get_submodule(f"{path}.{name}").weight()
            assert torch.equal(fx_weight.int_repr(), weight)


def test_one_layer_gives_the_integers_fx_gives(both: Both) -> None:
    """With two layers FX requantizes h_n and c_n (B5), so only the output is compared there."""
    torch.manual_seed(2)
    args = both.variant.batch(steps=9, batch=6)
    with torch.no_grad():
        mine, fx_result = leaves(both.ours(*args)), leaves(both.theirs(*args))
    for a, b in list(zip(mine, fx_result, strict=True))[: 3 if both.variant.num_layers == 1 else 1]:
        step = float(b.unique().diff().median())
        difference = (a - b).abs()
        # The quantize ops of the two differ in a few values in a million, and a state carries that on.
        assert float(difference.max()) <= 1.01 * step
        assert float((difference > 0.01 * step).float().mean()) < 0.01


def test_outside_the_calibrated_range_it_saturates_where_fx_does(both: Both) -> None:
    x, h, c = both.variant.batch(steps=7, batch=4)
    wide = (4 * x, 4 * h, 4 * c)
    with torch.no_grad():
        exact, mine, fx_result = (run(*wide)[0] for run in (both.model, both.ours, both.theirs))
    assert sqnr(exact, mine) < 25
    assert sqnr(fx_result, mine) > 35


class Tagger(nn.Module):
    """Embedding, LSTM and classifier, with the state as an argument, the only form FX accepts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, INPUTS)
        self.lstm = nn.LSTM(INPUTS, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.out = nn.Linear(HIDDEN, 5)

    def forward(self, tokens: Tensor, h: Tensor, c: Tensor) -> Tensor:
        y, _ = self.lstm(self.embedding(tokens), (h, c))
        return self.out(self.norm(y))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(INPUTS, HIDDEN)
        self.lstm = nn.LSTM(INPUTS, HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.sigmoid, self.softmax = nn.Sigmoid(), nn.Softmax(-1)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        y, _ = self.lstm(x, (h, c))
        gated = y * self.sigmoid(self.gate(x))
        return self.softmax(self.out(gated)), torch.tanh(self.out(gated + y))


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(INPUTS, HIDDEN)
        self.second = nn.LSTM(HIDDEN, HIDDEN)
        self.out = nn.Linear(HIDDEN, 5)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        y, (h, c) = self.lstm(x, (h, c))
        z, (h, _) = self.second(y, (h, c))
        return self.out(z), h


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("make", [Tagger, Gated, Stacked], ids=lambda make: make.__name__)
def test_ops_around_an_lstm(make: Callable[[], nn.Module], backend: str) -> None:
    torch.manual_seed(0)
    model = make().eval()
    mapping = get_default_qconfig_mapping(backend)
    mapping.set_object_type(nn.Embedding, float_qparams_weight_only_qconfig)
    batches = [around_batch(model, steps=3, batch=40) for _ in range(2)]
    _, ours = by_us(model, mapping, batches, MAP_LSTM)
    _, theirs = by_fx(model, mapping, batches, MAP_LSTM)
    assert activation_qparams(ours) == fx_activation_qparams(theirs)
    args = around_batch(model, steps=9, batch=3)
    with torch.no_grad():
        results = [leaves(run(*args)) for run in (model, ours, theirs)]
    for exact, mine, fx_result in zip(*results, strict=True):
        assert max(15.0, sqnr(exact, fx_result) - 0.5) < sqnr(exact, mine) < 60


def around_batch(model: nn.Module, steps: int, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens = torch.randint(0, 20, (steps, batch))
    x = tokens if isinstance(model, Tagger) else torch.randn(steps, batch, INPUTS)
    return x, 0.5 * torch.randn(1, batch, HIDDEN), 0.5 * torch.randn(1, batch, HIDDEN)
