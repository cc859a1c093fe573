"""GRU, RNN and the cells over a model's life: explained, copied, saved; and typical mistakes."""

from __future__ import annotations

import contextlib
import copy
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import MinMaxObserver, get_default_qconfig_mapping
from torch.ao.quantization.backend_config import get_qnnpack_backend_config
from torch.ao.quantization.fx.custom_config import PrepareCustomConfig
from torch.fx import GraphModule

import torchq_compat as tc
from tests.helpers.lstm_flow import fixed, uniform
from tests.helpers.oracle import calibrate, leaves, sqnr
from torchq_compat.errors import (
    CaptureError,
    ConfigError,
    CustomModuleError,
    QuantizationWarning,
    TorchQCompatError,
)
from torchq_compat.nn import quantizable, quantized
from torchq_compat.recurrent.cells import GRU_PARTS, RNN_RELU_PARTS, RNN_TANH_PARTS
from torchq_compat.recurrent_parts import get_individually_observed_parts

MAPPING = get_default_qconfig_mapping("qnnpack")
Quantized = tuple[nn.Module, GraphModule, GraphModule]
MAP_ALL = PrepareCustomConfig()
for float_class in (nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell):
    MAP_ALL.set_float_to_observed_mapping(float_class, getattr(quantizable, float_class.__name__))


class Tagger(nn.Module):
    def __init__(self, recurrent: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.recurrent = recurrent

    def forward(self, x: Tensor) -> Any:
        return self.recurrent(self.embed(x))


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "GRU": lambda: nn.GRU(8, 12, bidirectional=True),
    "RNN": lambda: nn.RNN(8, 12, 2),
    "ReLU RNN": lambda: nn.RNN(8, 12, nonlinearity="relu", batch_first=True),
    "LSTMCell": lambda: nn.LSTMCell(8, 12),
    "GRUCell": lambda: nn.GRUCell(8, 12),
    "RNNCell": lambda: nn.RNNCell(8, 12, nonlinearity="relu"),
}


def batch(name: str) -> tuple[Tensor]:
    return (uniform(1.5, *((64, 6) if "Cell" in name else (5, 9, 6))),)


@functools.cache
def prepared_as(name: str) -> tuple[nn.Module, GraphModule]:
    """Return (float, prepared), which has seen no data."""
    torch.manual_seed(0)
    model = Tagger(MAKERS[name]()).eval()
    return model, tc.prepare_fx(model, MAPPING, batch(name), MAP_ALL)


@pytest.fixture(params=MAKERS, scope="module")
def stages(request: pytest.FixtureRequest) -> tuple[str, Quantized]:
    torch.manual_seed(0)
    model, prepared = copy.deepcopy(prepared_as(request.param))
    calibrate(prepared, [batch(request.param) for _ in range(4)])
    return request.param, (model, prepared, tc.convert_to_reference_fx(prepared))


@functools.cache
def others(name: str) -> tuple[GraphModule, GraphModule]:
    """Return (prepared, converted) with other weights and other data."""
    torch.manual_seed(1)
    prepared = copy.deepcopy(prepared_as(name)[1])
    for parameter in prepared.parameters():
        parameter.data = uniform(0.3, *parameter.shape)
    calibrate(prepared, [(3 * x,) for (x,) in [batch(name)]])
    return prepared, tc.convert_to_reference_fx(prepared)


def assert_equal(a: Any, b: Any) -> None:
    assert all(torch.equal(p, q) for p, q in zip(leaves(a), leaves(b), strict=True))


def test_the_classes_are_those_one_names(stages: tuple[str, Quantized]) -> None:
    name, (model, prepared, converted) = stages
    kind = type(model.recurrent).__name__
    assert type(prepared.recurrent) is getattr(quantizable, kind)
    assert type(converted.recurrent) is getattr(quantized, kind)
    (x,) = batch(name)
    for exact, found in zip(leaves(model(x)), leaves(converted(x)), strict=True):
        assert 25 < sqnr(exact, found) < 60


@pytest.mark.parametrize("stage", [1, 2])
def test_a_copy_computes_the_same_and_shares_nothing(stages: tuple[str, Quantized], stage: int) -> None:
    name, of_stages = stages
    (x,), original = batch(name), of_stages[stage]
    before = original(x)
    twin = copy.deepcopy(original)
    assert_equal(twin(x), before)
    for value in twin.state_dict().values():
        value.zero_()
    assert_equal(original(x), before)


def test_prepared_state_goes_into_a_second_prepared_model(stages: tuple[str, Quantized]) -> None:
    name, (_, prepared, _) = stages
    other = copy.deepcopy(others(name)[0])
    (x,) = batch(name)
    different = tc.convert_fx(other)(x)
    other.load_state_dict(copy.deepcopy(prepared.state_dict()))
    expected = tc.convert_fx(prepared)(x)
    assert_equal(tc.convert_fx(other)(x), expected)
    assert not torch.equal(leaves(different)[0], leaves(expected)[0])


def test_converted_state_goes_into_a_second_converted_model(stages: tuple[str, Quantized]) -> None:
    name, (_, _, converted) = stages
    other = copy.deepcopy(others(name)[1])
    (x,) = batch(name)
    assert not torch.equal(leaves(other(x))[0], leaves(converted(x))[0])
    other.load_state_dict(copy.deepcopy(converted.state_dict()))
    assert_equal(other(x), converted(x))


TABLES = {"GRU": GRU_PARTS, "RNN": RNN_TANH_PARTS, "ReLU RNN": RNN_RELU_PARTS, "GRUCell": GRU_PARTS}


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("stages", TABLES, indirect=True)
def test_explain_lists_the_parts_of_every_cell(stages: tuple[str, Quantized], stage: int) -> None:
    name, of_stages = stages
    found = tc.explain(of_stages[stage]).find("recurrent")
    layers = 2 if name == "RNN" else 1
    directions = ("layer_fw", "layer_bw") if name == "GRU" else ("layer_fw",)
    cells = [f"layers.{layer}.{direction}.cell" for layer in range(layers) for direction in directions]
    cells = ["cell"] if "Cell" in name else cells
    parts = [d for d in found if d.path != "recurrent" and "/" not in d.path]
    assert [(d.path, d.kind) for d in parts] == [
        (f"recurrent.{cell}.{part.name}", part.formula) for cell in cells for part in TABLES[name]
    ]
    assert all(("scale" in d.details) == (stage == 2) and d.details["dtype"] for d in parts)


def test_left_float_without_a_mapping_and_warned() -> None:
    model = Tagger(MAKERS["GRU"]()).eval()
    with pytest.warns(QuantizationWarning, match=r"torch\.nn\.GRU, torchq_compat\.nn\.quantizable\.GRU"):
        prepared = tc.prepare_fx(model, MAPPING, batch("GRU"))
    (x,) = batch("GRU")
    assert type(prepared.recurrent) is nn.GRU
    assert_equal(prepared(x), model(x))


class Doubling(nn.GRU):
    def forward(self, x: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        output, h = super().forward(x, hx)
        return 2 * output, h


class Documented(nn.GRU):
    def forward(self, x: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x, hx)


class Renamed(nn.GRU):
    pass


@pytest.mark.parametrize(
    ("subclass", "is_warned", "is_refused"),
    [(Doubling, True, True), (Documented, True, False), (Renamed, False, False)],
)
def test_a_subclass_with_a_forward_of_its_own_is_warned_about(
    subclass: type[nn.GRU], is_warned: bool, is_refused: bool
) -> None:
    """A mapping of the subclass declares it to be a GRU; torch.ao's from_float silently drops the forward of
    an LSTM subclass. Where dropping it changes the results, prepare refuses."""
    config = PrepareCustomConfig().set_float_to_observed_mapping(subclass, quantizable.GRU)
    (x,) = batch("GRU")
    model = Tagger(subclass(8, 12)).eval()
    with contextlib.ExitStack() as expected:
        if is_refused:
            hint = r"(?s)computes something else.*Hint: map the class to an observed class of yours"
            expected.enter_context(pytest.raises(CaptureError, match=hint))
        if is_warned:
            said = f"{subclass.__name__} at 'recurrent' has a forward of its own"
            expected.enter_context(pytest.warns(QuantizationWarning, match=said))
        prepared = tc.prepare_fx(model, MAPPING, (x,), config)
        for exact, found in zip(model(x), prepared(x), strict=True):
            torch.testing.assert_close(found, exact, atol=1e-5, rtol=0)


def test_used_on_its_own_without_a_model() -> None:
    torch.manual_seed(0)
    gru = nn.GRU(6, 12)
    gru.qconfig = MAPPING.global_qconfig
    observed = quantizable.GRU.from_float(gru)
    x, h = torch.randn(5, 9, 6), torch.rand(1, 9, 12) * 2 - 1
    for exact, found in zip(gru(x, h), observed(x, h), strict=True):
        torch.testing.assert_close(found, exact, atol=1e-5, rtol=0)
    converted = quantized.GRU.from_observed(observed)
    for exact, found in zip(gru(x, hx=h), converted(x, hx=h), strict=True):
        assert 25 < sqnr(exact, found) < 60


# Bad input


def with_qconfig(module: nn.Module) -> nn.Module:
    module.qconfig = MAPPING.global_qconfig
    return module


@pytest.mark.parametrize(
    ("module", "group"),
    [
        (nn.GRU(4, 6), "cell_state_obs_ctr"),
        (nn.RNN(4, 6), "sigmoid_obs_ctr"),
        (nn.RNN(4, 6, nonlinearity="relu"), "linear_output_obs_ctr"),
        (nn.LSTMCell(4, 6), "hidden_product_obs_ctr"),
        (nn.GRUCell(4, 6), "tanh"),
    ],
)
def test_a_group_the_module_does_not_have(module: nn.Module, group: str) -> None:
    with pytest.raises(ConfigError, match=f"^{group} is no constructor of the parts of") as caught:
        get_individually_observed_parts(with_qconfig(module), **{group: MinMaxObserver})
    assert re.search(r"Hint: it has .*\bhgates_obs_ctr.*\bweight_obs_ctr\. \[TQ911\]$", str(caught.value))


def test_split_gates_where_there_are_none() -> None:
    for module in (nn.RNN(4, 6), nn.RNNCell(4, 6, nonlinearity="relu")):
        with pytest.raises(ConfigError, match="has no gates to split") as caught:
            get_individually_observed_parts(with_qconfig(module), split_gates=True)
        assert "Hint: leave split_gates out" in str(caught.value)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_no_qconfig(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(ConfigError, match="has no qconfig") as caught:
        get_individually_observed_parts(make())
    assert "Hint: prepare_fx sets it" in str(caught.value)


def test_what_is_not_recurrent() -> None:
    with pytest.raises(CustomModuleError, match=r"GRU.*is needed, got Linear") as caught:
        get_individually_observed_parts(with_qconfig(nn.Linear(3, 3)))
    assert "Hint:" in str(caught.value)
    with pytest.raises(CustomModuleError, match="which this package cannot run"):
        quantized.GRU.from_observed(nn.GRU(3, 3))


@pytest.mark.parametrize(
    ("group", "part", "op"),
    [
        ("sigmoid_obs_ctr", "reset_gate", "Sigmoid"),
        ("tanh_obs_ctr", "new_gate", "Tanh"),
        ("hidden_product_obs_ctr", "kgate_ngate", "mul"),
        ("hidden_state_obs_ctr", "hy", "add"),
    ],
)
def test_a_dtype_the_backend_does_not_allow_names_the_part(group: str, part: str, op: str) -> None:
    wide = fixed(2**-15, 0, torch.qint32)
    with pytest.raises(ConfigError, match=rf"part '{part}' is observed as int32.*for {op}\.") as caught:
        get_individually_observed_parts(
            with_qconfig(nn.GRU(4, 6)), None, get_qnnpack_backend_config(), **{group: wide}
        )
    assert "Hint: it allows int8, uint8" in str(caught.value)


class WithState(nn.Module):
    def __init__(self, recurrent: nn.Module) -> None:
        super().__init__()
        self.recurrent = recurrent

    def forward(self, x: Tensor, h: Any) -> Any:
        return self.recurrent(x, h)


X, H = torch.randn(5, 3, 4), torch.randn(1, 3, 6)


@pytest.mark.parametrize(
    ("module", "args", "problem"),
    [
        (nn.GRU(4, 6), (torch.randn(5, 3, 7), H), r"last dimension must be 4, got 7"),
        (nn.GRU(4, 6), (X, torch.randn(2, 3, 6)), r"h must have shape \(1, 3, 6\), got \(2, 3, 6\)"),
        (nn.RNN(4, 6), (X, torch.randn(3, 6)), r"h must have 3 dimensions"),
        (nn.RNN(4, 6), (X, (H, H)), r"h must be a tensor, got tuple"),
        (nn.GRUCell(4, 6), (X[0], torch.randn(3, 7)), r"h must have shape \(3, 6\), got \(3, 7\)"),
        (nn.GRUCell(4, 6), (X[0], (H[0], H[0])), r"h must have shape \(3, 6\), got tuple"),
        (nn.RNNCell(4, 6), (X, H[0]), r"the input must be \(batch, 4\) or \(4,\)"),
        (nn.LSTMCell(4, 6), (X[0], H[0]), r"the state must be a pair \(h, c\)"),
    ],
)
def test_wrong_shapes(module: nn.Module, args: tuple[Any, ...], problem: str) -> None:
    model = WithState(module).eval()
    before = copy.deepcopy(model.state_dict())
    with pytest.warns(QuantizationWarning, match=problem):
        waiting = tc.prepare_fx(model, MAPPING, args, MAP_ALL)
    with pytest.raises(TorchQCompatError, match=problem) as caught:
        waiting(*args)
    assert "'recurrent'" in str(caught.value)
    assert "Hint:" in str(caught.value)
    assert type(model.recurrent) is type(module)
    assert not hasattr(module, "qconfig")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_wrong_shapes_of_a_converted_module() -> None:
    gru = with_qconfig(nn.GRU(4, 6))
    observed = get_individually_observed_parts(gru)
    observed(X, H)
    with pytest.raises(CustomModuleError, match=r"last dimension must be 4, got 5"):
        quantized.GRU.from_observed(observed)(torch.randn(5, 3, 5))
    with pytest.raises(CustomModuleError, match=r"the sequence has no steps"):
        observed(torch.randn(0, 3, 4))
