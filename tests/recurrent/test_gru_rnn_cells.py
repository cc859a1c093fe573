"""GRU, RNN and the cells: the LSTM's contract, swept over them."""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy
from torch import Tensor, nn
from torch.ao.quantization import (
    MinMaxObserver,
    QConfig,
    QConfigMapping,
    default_weight_observer,
    get_default_qconfig_mapping,
)
from torch.ao.quantization.fx.custom_config import PrepareCustomConfig
from torch.fx import GraphModule

from tests.helpers.lstm_flow import fixed, part_qparams, uniform
from tests.helpers.oracle import by_us, sqnr
from tests.helpers.recurrent_points import Kind, Model, Point, Profile, check, points, sweep
from torchq_compat import profiles
from torchq_compat.nn import quantizable
from torchq_compat.recurrent_parts import get_individually_observed_parts


def map_to_parts_of(float_class: type[nn.Module], **arguments: Any) -> PrepareCustomConfig:
    """Return a config that maps ``float_class`` to a user's observed class with these parts."""
    base: Any = getattr(quantizable, float_class.__name__)

    class UserObserved(base):  # type: ignore[misc]
        @classmethod
        def from_float(cls, module: nn.Module) -> nn.Module:
            return get_individually_observed_parts(module, **arguments)

    return PrepareCustomConfig().set_float_to_observed_mapping(float_class, UserObserved)


def map_either(float_class: type[nn.Module], cell_class: type[nn.Module], **arguments: Any) -> Any:
    """Return a config with both mappings: of the module over sequences and of its cell."""
    config = map_to_parts_of(float_class, **arguments)
    static = map_to_parts_of(cell_class, **arguments).float_to_observed_mapping
    for quant_type, mapping in static.items():
        for found, observed in mapping.items():
            config.set_float_to_observed_mapping(found, observed, quant_type)
    return config


def int16_everywhere(module: nn.Module) -> dict[str, Any]:
    """Return the 16-bit profile with 16 bits for the parts it keeps at 8, and states within [-8, 8)."""
    return {
        **profiles.int16_parts(module),
        "igates_obs_ctr": fixed(2**-11, 0, torch.qint32),
        "hgates_obs_ctr": fixed(2**-11, 0, torch.qint32),
        "hidden_state_obs_ctr": fixed(2**-12, 0, torch.int16),
    }


GRU = Kind(
    "GRU",
    nn.GRU,
    nn.GRUCell,
    functools.partial(map_either, nn.GRU, nn.GRUCell),
    states=(0.8,),
    bias=(1.0, 0.5, 0.0),
    sums=(1, 2),
    others=9,
)
OF_RNN = functools.partial(map_either, nn.RNN, nn.RNNCell)
RNN = Kind("RNN", nn.RNN, nn.RNNCell, OF_RNN, states=(0.8,), bias=(0.0,), sums=(1, 1), others=1)
RELU_RNN = Kind(
    "RNN with ReLU",
    functools.partial(nn.RNN, nonlinearity="relu"),
    functools.partial(nn.RNNCell, nonlinearity="relu"),
    OF_RNN,
    states=(0.8,),
    bias=(0.3,),
    sums=(0, 0),
    others=1,
)
KINDS = (GRU, RNN, RELU_RNN)
MAPPING = get_default_qconfig_mapping("qnnpack")
PARAMETERS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


def bars(gru: float, rnn: float, relu: float) -> dict[str, float]:
    return {"GRU": gru, "RNN": rnn, "RNN with ReLU": relu}


PROFILES = (
    Profile(profiles.int8_parts, bars(29, 32, 33)),
    Profile(profiles.int16_parts, bars(30, 33, 33)),
    Profile(profiles.int8_with_int16_cell, bars(35, 38, 38)),
    Profile(int16_everywhere, bars(37, 39, 39), requantizes=True),
)
#: The other combinations run the same code.
QUICK = ("GRU-int8_parts", "RNN-int16_parts", "RNN with ReLU-int8_with_int16_cell")
FACTORS = [
    pytest.param(k, p, id=f"{k}-{p}", marks=() if f"{k}-{p}" in QUICK else pytest.mark.slow)
    for k in KINDS
    for p in PROFILES
]


def check_some(strategy: SearchStrategy[Point], examples: int) -> None:
    @settings(sweep, max_examples=examples)
    @given(point=strategy)
    def check_each(point: Point) -> None:
        check(point)

    check_each()


@pytest.mark.parametrize(("kind", "profile"), FACTORS)
def test_contract(kind: Kind, profile: Profile) -> None:
    check_some(points((kind,), (profile,)), 2)


@pytest.mark.parametrize("kind", KINDS, ids=repr)
def test_contract_of_cells(kind: Kind) -> None:
    check_some(points((kind,), PROFILES, single_step=True), 5)


@pytest.mark.slow
@pytest.mark.parametrize("single_step", [False, True])
@pytest.mark.parametrize(("kind", "profile"), FACTORS)
def test_contract_at_length(kind: Kind, profile: Profile, single_step: bool) -> None:
    check_some(points((kind,), (profile,), single_step=single_step), 20)


def test_the_hidden_state_of_a_relu_rnn_is_not_cut_off_at_one() -> None:
    """The 16-bit profile keeps states within [-1, 1), which the states of a ReLU RNN exceed."""
    torch.manual_seed(0)
    model = Model(nn.RNN(8, 12, nonlinearity="relu")).eval()
    for parameter in model.parameters():
        parameter.data *= 2
    data = [(uniform(1.0, 6, 32, 8),) for _ in range(3)]
    exact = model(*data[0])[0]
    assert float(exact.max()) > 2
    given = profiles.int16_parts(model.recurrent)
    cut_off = {**given, "hidden_state_obs_ctr": profiles.int16_parts()["hidden_state_obs_ctr"]}
    assert "hidden_state_obs_ctr" in profiles.int16_parts(nn.RNN(8, 12))
    found = []
    for constructors in (given, cut_off):
        _, converted = by_us(model, MAPPING, data, OF_RNN(**constructors))
        found.append(sqnr(exact, converted(*data[0])[0]))
    assert found[0] > 33
    assert found[1] < 15


# The result of calibrating torch's formula by hand.

Parts = dict[str, list[Tensor]]


def gru_by_hand(weights: list[Tensor], x: Tensor, h: Tensor) -> Parts:
    """Return all intermediate values of torch.nn.GRU's formula over the steps of ``x`` (T, B, I)."""
    w_ih, w_hh, b_ih, b_hh = weights
    seen: Parts = defaultdict(list)
    for step in x:
        igates, hgates = F.linear(step, w_ih, b_ih), F.linear(h, w_hh, b_hh)
        (i_r, i_z, i_n), (h_r, h_z, h_n) = igates.chunk(3, 1), hgates.chunk(3, 1)
        r, z = torch.sigmoid(i_r + h_r), torch.sigmoid(i_z + h_z)
        n = torch.tanh(i_n + r * h_n)
        values = {
            "igates": igates,
            "hgates": hgates,
            "gates": torch.cat([i_r + h_r, i_z + h_z], 1),
            "rgate_hgate": r * h_n,
            "igate_rgate_hgate": i_n + r * h_n,
            "kgate_ngate": (1 - z) * n,
            "zgate_hx": z * h,
            "hy": (1 - z) * n + z * h,
        }
        h = values["hy"]
        for name, value in values.items():
            seen[name].append(value)
    return seen


def rnn_by_hand(weights: list[Tensor], x: Tensor, h: Tensor) -> Parts:
    w_ih, w_hh, b_ih, b_hh = weights
    seen: Parts = defaultdict(list)
    for step in x:
        igates, hgates = F.linear(step, w_ih, b_ih), F.linear(h, w_hh, b_hh)
        h = torch.tanh(igates + hgates)
        for name, value in {"igates": igates, "hgates": hgates, "gates": igates + hgates, "hy": h}.items():
            seen[name].append(value)
    return seen


def relu_rnn_by_hand(weights: list[Tensor], x: Tensor, h: Tensor) -> Parts:
    w_ih, w_hh, b_ih, b_hh = weights
    seen: Parts = defaultdict(list)
    for step in x:
        igates, hgates = F.linear(step, w_ih, b_ih), F.linear(h, w_hh, b_hh)
        h = torch.relu(igates + hgates)
        for name, value in {"igates": igates, "hgates": hgates, "hy": h}.items():
            seen[name].append(value)
    return seen


SIGMOID_QPARAMS, TANH_QPARAMS = (2**-8, 0, torch.uint8), (2**-7, 128, torch.uint8)
FIXED = {
    "GRU": {
        **dict.fromkeys(("reset_gate", "update_gate", "keep_gate"), SIGMOID_QPARAMS),
        "new_gate": TANH_QPARAMS,
    },
    "RNN": {"hy": TANH_QPARAMS},
    "RNN with ReLU": {},
}
BY_HAND = {"GRU": gru_by_hand, "RNN": rnn_by_hand, "RNN with ReLU": relu_rnn_by_hand}


def min_max_qparams(values: list[Tensor]) -> tuple[float, int, torch.dtype]:
    observer = MinMaxObserver()
    for value in values:
        observer(value)
    scale, zero_point = observer.calculate_qparams()
    return pytest.approx(float(scale), rel=1e-5), int(zero_point), torch.uint8


@pytest.mark.parametrize("kind", KINDS, ids=repr)
def test_the_qparams_are_those_of_torchs_formula(kind: Kind) -> None:
    """Two layers, so that the second layer's input is the first layer's float output."""
    torch.manual_seed(0)
    module = kind.make(8, 12, 2)
    model = Model(module).eval()
    mapping = QConfigMapping().set_global(
        QConfig(activation=MinMaxObserver, weight=default_weight_observer)  # type: ignore[arg-type]
    )
    data = [(uniform(1.5, steps, 9, 8), uniform(0.9, 2, 9, 12)) for steps in (4, 7)]
    _, converted = by_us(model, mapping, data, kind.observe())
    seen: list[Parts] = [defaultdict(list), defaultdict(list)]
    with torch.no_grad():
        for x, h in data:
            exact, _ = module(x, h)
            for layer, parts in enumerate(seen):
                weights = [getattr(module, f"{name}_l{layer}") for name in PARAMETERS]
                found = BY_HAND[kind.name](weights, x, h[layer])
                x = torch.stack(found["hy"])
                for name, values in found.items():
                    parts[name].extend(values)
            torch.testing.assert_close(x, exact)
    for layer, parts in enumerate(seen):
        expected = {name: min_max_qparams(values) for name, values in parts.items()}
        cell = converted.get_submodule(f"recurrent.layers.{layer}.layer_fw.cell")
        assert isinstance(cell, GraphModule)
        assert part_qparams(cell) == {**expected, **FIXED[kind.name]}
