"""The profile with integer products and float gates and states."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import (
    QConfigMapping,
    disable_observer,
    get_default_qat_qconfig,
    get_default_qat_qconfig_mapping,
    get_default_qconfig,
    get_default_qconfig_mapping,
)
from torch.ao.quantization.backend_config import get_native_backend_config
from torch.ao.quantization.fx.custom_config import PrepareCustomConfig

import torchq_compat as tc
from tests.helpers.lstm_flow import uniform
from tests.helpers.oracle import calibrate, leaves, sqnr
from torchq_compat.errors import ArgumentError, QuantizationWarning
from torchq_compat.lower.integers.lowered_module import LoweredGraphModule
from torchq_compat.nn import quantizable
from torchq_compat.profiles import int8_parts, int8_products
from torchq_compat.recurrent_parts import get_individually_observed_parts
from torchq_compat.support.decisions import Action


class Model(nn.Module):
    """A recurrent module called with a state, and a linear behind it."""

    def __init__(self, recurrent: nn.Module, width: int) -> None:
        super().__init__()
        self.recurrent = recurrent
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor, *state: Any) -> Any:
        output, last = self.recurrent(x, *state)
        return self.head(output), output, last


def model_of(make: Callable[[], nn.RNNBase]) -> Model:
    torch.manual_seed(0)
    recurrent = make()
    for parameter in recurrent.parameters():
        parameter.data *= 1.5
    width = (recurrent.proj_size or recurrent.hidden_size) * (2 if recurrent.bidirectional else 1)
    return Model(recurrent, width).eval()


def mapped(float_class: type[nn.Module], profile: Callable[..., Any], **options: Any) -> PrepareCustomConfig:
    base: Any = getattr(quantizable, float_class.__name__)

    class Observed(base):  # type: ignore[misc]
        @classmethod
        def from_float(cls, module: nn.Module) -> Any:
            return get_individually_observed_parts(module, **profile(module), **options)

    return PrepareCustomConfig().set_float_to_observed_mapping(float_class, Observed)


def states(module: nn.RNNBase, size: int) -> tuple[Any, ...]:
    rows = module.num_layers * (2 if module.bidirectional else 1)
    hidden = uniform(0.4, rows, size, module.proj_size or module.hidden_size)
    cell = uniform(0.8, rows, size, module.hidden_size)
    return ((hidden, cell),) if isinstance(module, nn.LSTM) else (hidden,)


KINDS: dict[str, tuple[Callable[[], nn.RNNBase], dict[str, Any]]] = {
    "lstm": (lambda: nn.LSTM(16, 24, 2, bidirectional=True), {}),
    "projected lstm": (lambda: nn.LSTM(16, 24, proj_size=10), {}),
    "split lstm": (lambda: nn.LSTM(16, 24), {"split_gates": True}),
    "gru": (lambda: nn.GRU(16, 24, 2), {}),
    "rnn": (lambda: nn.RNN(16, 24, bidirectional=True), {}),
    "relu rnn": (lambda: nn.RNN(16, 24, nonlinearity="relu"), {}),
}


QUICK = ("projected lstm", "gru")


def converted(name: str, engine: str, profile: Callable[..., Any]) -> tuple[Model, Any, Any]:
    """Return the float model, the converted one, and data it was not calibrated with."""
    make, options = KINDS[name]
    model = model_of(make)
    recurrent: Any = model.recurrent

    def batch(steps: int, size: int) -> tuple[Any, ...]:
        return uniform(1.5, steps, size, 16), *states(recurrent, size)

    mapping = QConfigMapping().set_global(get_default_qconfig(engine))
    prepared = tc.prepare_fx(model, mapping, batch(9, 4), mapped(type(recurrent), profile, **options))
    calibrate(prepared, [batch(9, 4) for _ in range(6)])
    return model, tc.convert_fx(prepared), batch(23, 3)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in KINDS]
)
@torch.no_grad()
def test_integers_in_products_alone(name: str) -> None:
    model, lowered, data = converted(name, "onednn", int8_products)
    assert isinstance(lowered, LoweredGraphModule)
    assert {d.action for d in tc.explain(lowered).decisions if d.path == "recurrent/lowering"} == {"lowered"}
    exact, expected, found = (leaves(each(*data))[1:] for each in (model, lowered.reference, lowered))
    for float_value, reference, value in zip(exact, expected, found, strict=True):
        # Sums in another order, which may move an integer by one step.
        assert sqnr(reference, value) > 55
        assert 30 < sqnr(float_value, value) < 50
    # The results are on no grid: nearly all of their numbers are distinct.
    output = found[0]
    assert output.unique().numel() > 0.9 * (output != 0).sum()
    state = lowered.state_dict()
    weights = [value for key, value in state.items() if key.startswith("recurrent.") and value.dim() == 2]
    integers = [value for value in weights if value.dtype is torch.int8]
    cells = len(list(lowered.reference.get_submodule("recurrent").cells()))
    assert len(integers) >= 2 * cells
    assert all(value.dtype in (torch.int8, torch.float64) for value in weights)


@pytest.mark.slow
@torch.no_grad()
def test_the_whole_range_is_worth_it_and_so_is_the_profile() -> None:
    found = {}
    for engine in ("x86", "onednn"):
        for profile in (int8_parts, int8_products):
            model, lowered, data = converted("lstm", engine, profile)
            found[engine, profile] = sqnr(model(*data)[1], lowered(*data)[1])
    reduced, whole = found["x86", int8_products], found["onednn", int8_products]
    assert 2 < whole - reduced < 8
    assert 4 < whole - found["onednn", int8_parts] < 20
    assert whole > 36


@torch.no_grad()
def test_explain_says_what_stays_float() -> None:
    _, lowered, _ = converted("projected lstm", "onednn", int8_products)
    cell = [
        d for d in tc.explain(lowered).decisions if d.path.startswith("recurrent.layers.0.layer_fw.cell.")
    ]
    by_part = {d.path.rpartition(".")[2]: d for d in cell if d.is_part}
    assert by_part["fgate_cx"].action is Action.FLOAT
    assert "its observer is of a float dtype" in by_part["fgate_cx"].reason
    assert by_part["hgates"].action is Action.QUANTIZED
    roles = {value.role: value.dtype for value in by_part["hgates"].values}
    assert roles == {"input": torch.uint8, "weight": torch.int8}


@pytest.mark.parametrize("shape", ["rolled", "opaque"])
@pytest.mark.slow
@torch.no_grad()
def test_exported(shape: Any) -> None:
    _, lowered, data = converted("lstm", "onednn", int8_products)
    program = tc.export(lowered.reference, data, recurrent=shape).module()
    for expected, found in zip(leaves(lowered.reference(*data)), leaves(program(*data)), strict=True):
        assert sqnr(expected, found) > 55


@pytest.mark.slow
@torch.no_grad()
def test_a_state_with_qparams_loads() -> None:
    _, lowered, data = converted("gru", "onednn", int8_products)
    _, other, _ = converted("gru", "x86", int8_products)
    assert sqnr(lowered(*data)[1], other(*data)[1]) < 60
    other.load_state_dict(lowered.state_dict())
    assert sqnr(lowered(*data)[1], other(*data)[1]) > 120


def test_quantization_aware_training() -> None:
    torch.manual_seed(0)
    model = model_of(lambda: nn.LSTM(16, 24)).train()
    x, target = uniform(1.5, 12, 8, 16), torch.randn(12, 8, 5)
    mapping = QConfigMapping().set_global(get_default_qat_qconfig("onednn"))
    prepared = tc.prepare_qat_fx(
        model, mapping, (x,), mapped(nn.LSTM, lambda m: int8_products(m, fake_quantize=True))
    )
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.2)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = (prepared(x)[0] - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    prepared.eval().apply(disable_observer)
    converted = tc.convert_fx(prepared)
    with torch.no_grad():
        trained, found = prepared(x)[1], converted(x)[1]
    assert sqnr(trained, found) > 45
    assert converted.state_dict()["recurrent.layers.0.layer_fw.cell._frozen_param0"].dtype is torch.int8


def test_a_backend_config_has_no_say_about_floats() -> None:
    module = nn.LSTM(4, 6).eval()
    module.qconfig = get_default_qconfig("x86")  # type: ignore[assignment]
    observed = get_individually_observed_parts(
        module, backend_config=get_native_backend_config(), **int8_products()
    )
    assert observed(torch.randn(3, 2, 4))[0].shape == (3, 2, 6)


@pytest.mark.slow
def test_one_part_alone_may_stay_float() -> None:
    """In any profile: the cell state in floats, everything else in eight bits."""

    def profile(module: nn.Module) -> dict[str, Any]:
        return {name: value for name, value in int8_products(module).items() if name == "cell_state_obs_ctr"}

    with torch.no_grad():
        model, lowered, data = converted("split lstm", "onednn", profile)
        exact, expected, found = (leaves(each(*data)) for each in (model, lowered.reference, lowered))
    for float_value, reference, value in zip(exact[1:], expected[1:], found[1:], strict=True):
        assert sqnr(reference, value) > 45
        assert 24 < sqnr(float_value, value) < 45
    assert found[3].unique().numel() > 60  # c_n
    assert found[2].unique().numel() < 72  # h_n lies on a grid of eight bits


def test_single_steps_alone_show_no_hidden_state() -> None:
    model = model_of(lambda: nn.GRU(16, 24))
    mapping = QConfigMapping().set_global(get_default_qconfig("onednn"))
    prepared = tc.prepare_fx(model, mapping, (torch.randn(3, 2, 16),), mapped(nn.GRU, int8_products))
    calibrate(prepared, [(torch.randn(1, 2, 16),) for _ in range(3)])
    with pytest.warns(QuantizationWarning, match="calibrated with single steps alone"):
        tc.convert_fx(prepared)


def test_the_default_config_takes_a_profile() -> None:
    """One argument maps every recurrent class, with the accuracy of the profile; without it as FX does."""
    model, x = model_of(lambda: nn.LSTM(16, 24, 2, bidirectional=True)), uniform(1.0, 40, 4, 16)
    decibels = {}
    for profile in (None, int8_products):
        config = tc.get_default_prepare_custom_config(profile)
        assert (
            config.float_to_observed_mapping.keys()
            == tc.get_default_prepare_custom_config().float_to_observed_mapping.keys()
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error", QuantizationWarning)
            prepared = tc.prepare_fx(model, get_default_qconfig_mapping("x86"), (x,), config)
            prepared(x)
            converted = tc.convert_fx(prepared, tc.get_default_convert_custom_config())
        assert not [row for row in tc.explain(prepared) if row.action is Action.DROPPED]
        decibels[profile] = sqnr(model(x)[1], converted(x)[1])
    assert 15 < decibels[None] < 32
    assert decibels[None] + 4 < decibels[int8_products] < 45


def test_a_profile_trains() -> None:
    model, x = nn.Sequential(nn.GRU(8, 8)), uniform(1.0, 10, 4, 8)
    config = tc.get_default_prepare_custom_config(int8_products)
    trained = tc.prepare_qat_fx(model, get_default_qat_qconfig_mapping("qnnpack"), (x,), config)
    trained(x)[0].square().mean().backward()
    assert all(parameter.grad is not None for parameter in trained.parameters())
    expected = trained.apply(disable_observer).eval()(x)[0]
    assert sqnr(expected, tc.convert_fx(trained)(x)[0]) > 60


def test_what_is_no_profile() -> None:
    with pytest.raises(ArgumentError, match=r"profile .*a function of torchq_compat.profiles"):
        tc.get_default_prepare_custom_config("int8_products")  # type: ignore[arg-type]
