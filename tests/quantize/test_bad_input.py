"""Bad input: an error of this package that names the cause, a hint, and an unchanged float model."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx as fx
from torch import Tensor, nn
from torch.ao.quantization import (
    MinMaxObserver,
    QConfig,
    QConfigMapping,
    default_dynamic_qconfig,
    default_weight_observer,
)
from torch.ao.quantization.fx.custom_config import ConvertCustomConfig, PrepareCustomConfig

import torchq_compat as tc
from tests.helpers.once import made_once
from tests.helpers.oracle import MAP_LSTM, calibrate
from torchq_compat.capture import torch_export
from torchq_compat.errors import (
    CaptureError,
    ConfigError,
    ConvertError,
    CustomModuleError,
    InputError,
    QuantizationWarning,
    TorchQCompatError,
)
from torchq_compat.quantize.first_call import at_once

INPUTS, HIDDEN = 8, 16
MAPPING = QConfigMapping().set_global(QConfig(MinMaxObserver, default_weight_observer))
PREPARES = [tc.prepare_fx, tc.prepare_qat_fx]
#: What these raise is a warning of the others; see test_first_call.py.
AT_ONCE = [at_once(prepare) for prepare in PREPARES]
CONVERTS = [tc.convert_fx, tc.convert_to_reference_fx]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(INPUTS, INPUTS)
        self.lstm = nn.LSTM(INPUTS, HIDDEN)
        self.out = nn.Linear(HIDDEN, 4)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        y, _ = self.lstm(self.inp(x) + shift)
        return self.out(y)


class BranchOnValue(Model):
    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        y, _ = self.lstm(self.inp(x))
        if y.sum() > shift.sum():  # the line that cannot be captured
            y = y * 2
        return self.out(y)


class LoopInside(Model):
    """The line is in a submodule of the model, two calls down."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Doubling()

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        y, _ = self.lstm(self.inp(x))
        return self.out(self.inner(y))


class Doubling(nn.Module):
    def forward(self, y: Tensor) -> Tensor:
        while y.abs().max().item() < 1:  # the loop that cannot be captured
            y = 2 * y
        return y


class PicksByNumpy(Model):
    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        y, _ = self.lstm(self.inp(x))
        return self.out(y[: int(x.detach().numpy().max() > 0) + 1])  # numpy cannot be captured


def good_inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(5, 3, INPUTS), torch.zeros(INPUTS)


def attributes(model: nn.Module) -> dict[str, set[str]]:
    return {path: set(vars(module)) for path, module in model.named_modules()}


@contextmanager
def refused(
    model: nn.Module, error: type[TorchQCompatError], *named: str, builtin: type[Exception] | None = None
) -> Iterator[None]:
    """Assert that the body raises ``error`` with everything in ``named``, and leaves ``model`` unchanged."""
    state, before, training = copy.deepcopy(model.state_dict()), attributes(model), model.training
    hooks = {path: (len(m._forward_hooks), len(m._forward_pre_hooks)) for path, m in model.named_modules()}
    with pytest.raises(error) as caught:
        yield
    message = str(caught.value)
    for text in named:
        assert text in message
    problem, hint = message.split("\nHint: ")
    assert len(problem) > 20
    assert len(hint) > 20
    assert isinstance(caught.value, TorchQCompatError)
    assert builtin is None or isinstance(caught.value, builtin)
    assert attributes(model) == before
    assert model.training is training
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    after = {path: (len(m._forward_hooks), len(m._forward_pre_hooks)) for path, m in model.named_modules()}
    assert after == hooks


# example_inputs


@pytest.mark.parametrize("prepare", AT_ONCE)
def test_example_inputs_missing(prepare: Callable[..., Any]) -> None:
    """For a while FX accepted None and warned."""
    model = Model()
    with refused(model, InputError, "example_inputs is missing", builtin=ValueError):
        prepare(model, MAPPING)
    with refused(model, InputError, "example_inputs is missing"):
        prepare(model, MAPPING, None)


@pytest.mark.parametrize("prepare", AT_ONCE)
@pytest.mark.parametrize(
    ("value", "name"),
    [
        ((batch for batch in [good_inputs()]), "generator"),
        (3, "int"),
        ("x", "str"),
    ],
)
def test_example_inputs_that_are_no_tuple(prepare: Callable[..., Any], value: Any, name: str) -> None:
    model = Model()
    with refused(model, InputError, "must be a tuple", f"got {name}", builtin=ValueError):
        prepare(model, MAPPING, value, MAP_LSTM)


@pytest.mark.parametrize("config", [None, MAP_LSTM], ids=["unmapped", "mapped"])
@pytest.mark.parametrize(
    ("inputs", "named"),
    [
        ((torch.randn(5, 3, INPUTS),), "shift"),
        ((), "x"),
        ((*good_inputs(), torch.randn(3)), "they are 3"),
        ((torch.randn(5, 3, INPUTS + 1), torch.zeros(INPUTS)), "9"),
        ((torch.randn(5, 3, INPUTS), torch.zeros(INPUTS - 1)), "7"),
        ((torch.zeros(5, 3, INPUTS, dtype=torch.long), torch.zeros(INPUTS)), "Long"),
        ((None, torch.zeros(INPUTS)), "None"),
        (("text", torch.zeros(INPUTS)), "str"),
    ],
    ids=["one too few", "none at all", "one too many", "width", "broadcast", "dtype", "None", "str"],
)
@pytest.mark.filterwarnings("ignore")
def test_example_inputs_that_do_not_fit(
    inputs: tuple[Any, ...],
    named: str,
    config: PrepareCustomConfig | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, exports, export_with = Model(), [], torch_export.export_with
    monkeypatch.setattr(torch_export, "export_with", lambda *args: exports.append(args) or export_with(*args))
    with refused(
        model, InputError, "Model.forward does not run on the example_inputs", named, builtin=ValueError
    ):
        at_once(tc.prepare_fx)(model, MAPPING, inputs, config)
    assert len(exports) <= 1  # No other attempt would run.


class StateGiven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(INPUTS, HIDDEN)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return self.lstm(x, (h, h))[0]


@pytest.mark.parametrize(
    ("x", "h", "named"),
    [
        (torch.randn(2, 5, 3, INPUTS), torch.zeros(1, 3, HIDDEN), ["2 or 3 dimensions", "4"]),
        (torch.randn(5, 3, INPUTS + 1), torch.zeros(1, 3, HIDDEN), ["9"]),
        (torch.randn(5, 3, INPUTS), torch.zeros(1, 4, HIDDEN), ["(1, 3, 16)", "(1, 4, 16)"]),
        (torch.randn(5, 3, INPUTS), torch.zeros(2, 3, HIDDEN), ["(1, 3, 16)", "(2, 3, 16)"]),
        (torch.randn(5, 3, INPUTS), torch.zeros(3, HIDDEN), ["3 dimensions", "2"]),
    ],
    ids=["rank", "width", "batch of h", "layers of h", "rank of h"],
)
@pytest.mark.parametrize("config", [None, MAP_LSTM], ids=["unmapped", "mapped"])
@pytest.mark.filterwarnings("ignore")
def test_what_does_not_fit_the_lstm_names_it_and_the_sizes(
    x: Tensor, h: Tensor, named: list[str], config: PrepareCustomConfig | None
) -> None:
    model = StateGiven()
    with refused(model, TorchQCompatError, "'lstm'", *named):
        at_once(tc.prepare_fx)(model, MAPPING, (x, h), config)


@pytest.mark.parametrize("prepare", PREPARES)
@pytest.mark.parametrize("model", [lambda x: x, None, "model"], ids=["function", "None", "str"])
def test_a_model_that_is_none(prepare: Callable[..., Any], model: Any) -> None:
    with pytest.raises(InputError, match=r"(?s)must be an nn\.Module.*Hint:"):
        prepare(model, MAPPING, good_inputs())


# What torch.export cannot capture


@pytest.mark.parametrize("config", [None, MAP_LSTM], ids=["unmapped", "mapped"])
@pytest.mark.parametrize(
    ("make", "line"),
    [
        (BranchOnValue, "if y.sum() > shift.sum():"),
        (LoopInside, "while y.abs().max().item() < 1:"),
        (PicksByNumpy, "return self.out(y[: int(x.detach().numpy().max() > 0) + 1])"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_the_line_that_cannot_be_captured_is_named(
    make: Callable[[], nn.Module], line: str, config: PrepareCustomConfig | None
) -> None:
    model = make()
    model(*good_inputs())
    with open(__file__) as source:
        number = next(i for i, text in enumerate(source, 1) if text.strip().startswith(line))
    with refused(model, CaptureError, make.__name__, f"test_bad_input.py:{number}", line):
        tc.prepare_fx(model, MAPPING, good_inputs(), config)


# convert


@pytest.mark.parametrize("convert", CONVERTS)
@pytest.mark.parametrize(
    "make",
    [
        Model,
        lambda: nn.Sequential(nn.Linear(2, 2)),
        lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2))),
    ],
    ids=["float", "sequential", "traced"],
)
def test_converting_what_was_never_prepared(
    convert: Callable[..., Any], make: Callable[[], nn.Module]
) -> None:
    model = make()
    with refused(model, ConvertError, type(model).__name__, "prepare_fx"):
        convert(model)


@pytest.mark.parametrize("convert", CONVERTS)
def test_converting_what_something_else_prepared(convert: Callable[..., Any]) -> None:
    model = nn.Sequential(nn.Linear(2, 2)).eval()
    by_fx = fx.prepare_fx(copy.deepcopy(model), MAPPING, (torch.randn(1, 2),))
    exported = torch.export.export(model, (torch.randn(1, 2),)).module()
    for other in (by_fx, exported):
        with refused(other, ConvertError, "GraphModule", "was not made by torchq_compat.prepare_fx"):
            convert(other)


@pytest.mark.parametrize("convert", CONVERTS)
@pytest.mark.parametrize("value", [None, 3, "model"], ids=str)
def test_converting_what_is_no_model(convert: Callable[..., Any], value: Any) -> None:
    with pytest.raises(ConvertError, match=f"(?s){type(value).__name__}.*Hint:"):
        convert(value)


@made_once
def calibrated() -> nn.Module:
    prepared = tc.prepare_fx(Model(), MAPPING, good_inputs(), MAP_LSTM)
    calibrate(prepared, [good_inputs()])
    return prepared


@pytest.mark.parametrize("convert", CONVERTS)
def test_converting_twice(convert: Callable[..., Any]) -> None:
    converted = convert(calibrated())
    with refused(converted, ConvertError, "prepare_fx"):
        convert(converted)


# Custom-module classes


class NoFromFloat(torch.nn.Module):
    pass


class NotCallable(torch.nn.Module):
    from_float = "a string"


@pytest.mark.parametrize("observed", [NoFromFloat, NotCallable])
@pytest.mark.parametrize("form", ["object", "dict"])
@pytest.mark.parametrize("prepare", PREPARES)
def test_an_observed_class_without_from_float(
    prepare: Callable[..., Any], observed: type[nn.Module], form: str
) -> None:
    config: Any = {"float_to_observed_custom_module_class": {"static": {nn.LSTM: observed}}}
    if form == "object":
        config = PrepareCustomConfig().set_float_to_observed_mapping(nn.LSTM, observed)
    model = Model()
    named = (f"test_bad_input.{observed.__name__}", "float_to_observed_mapping", "'from_float'")
    with refused(model, CustomModuleError, *named):
        prepare(model, MAPPING, good_inputs(), config)


class MakesNothing(torch.ao.nn.quantizable.LSTM):
    @classmethod
    def from_float(cls, other: nn.Module, qconfig: Any = None) -> Any:
        return None


def test_from_float_that_returns_something_unusable() -> None:
    config = PrepareCustomConfig().set_float_to_observed_mapping(nn.LSTM, MakesNothing)
    model = Model()
    with refused(model, CustomModuleError, "from_float", "'lstm'", "NoneType"):
        tc.prepare_fx(model, MAPPING, good_inputs(), config)


class NoFromObserved(torch.nn.Module):
    pass


@pytest.mark.parametrize("convert", CONVERTS)
@pytest.mark.parametrize("form", ["object", "dict"])
def test_a_quantized_class_without_from_observed(convert: Callable[..., Any], form: str) -> None:
    observed = torch.ao.nn.quantizable.LSTM
    config: Any = {"observed_to_quantized_custom_module_class": {"static": {observed: NoFromObserved}}}
    if form == "object":
        config = ConvertCustomConfig().set_observed_to_quantized_mapping(observed, NoFromObserved)
    prepared = calibrated()
    named = ("test_bad_input.NoFromObserved", "observed_to_quantized_mapping", "'from_observed'")
    with refused(prepared, CustomModuleError, *named):
        convert(prepared, config)
    assert convert(prepared)(*good_inputs()).shape == (5, 3, 4)


# Configuration


@pytest.mark.parametrize("prepare", PREPARES)
@pytest.mark.parametrize(
    ("argument", "known"),
    [
        ("qconfig_mapping", "module_name_regex"),
        ("prepare_custom_config", "float_to_observed_custom_module_class"),
        ("backend_config", "configs"),
    ],
)
def test_an_unknown_key_of_prepare(prepare: Callable[..., Any], argument: str, known: str) -> None:
    """FX ignores it, so a misspelling quantizes nothing."""
    model = Model()
    arguments = {"qconfig_mapping": MAPPING, argument: {"modul_name": []}}
    with refused(model, ConfigError, argument, "unknown key 'modul_name'", repr(known), builtin=ValueError):
        prepare(model, example_inputs=good_inputs(), **arguments)


@pytest.mark.parametrize("convert", CONVERTS)
def test_an_unknown_key_of_convert(convert: Callable[..., Any]) -> None:
    prepared = calibrated()
    key = "observed_to_quantized"
    with refused(prepared, ConfigError, "convert_custom_config", f"unknown key {key!r}"):
        convert(prepared, {key: {}})


@pytest.mark.parametrize("convert", CONVERTS)
def test_a_qconfig_mapping_in_the_second_place_of_convert(convert: Callable[..., Any]) -> None:
    """FX's convert ignores a dict there, and fails on an object."""
    model = nn.Sequential(nn.Linear(4, 4)).eval()
    example = torch.randn(2, 4)
    prepared = tc.prepare_fx(model, MAPPING, (example,))
    prepared(example)
    with pytest.warns(QuantizationWarning, match="convert_custom_config is a qconfig dict"):
        converted = convert(prepared, MAPPING.to_dict())
    assert torch.equal(converted(example), convert(prepared)(example))
    with refused(prepared, ConfigError, "convert_custom_config is a QConfigMapping", "qconfig_mapping="):
        convert(prepared, MAPPING)


def test_an_unknown_key_of_fuse() -> None:
    model = Model().eval()
    with refused(model, ConfigError, "fuse_custom_config", "unknown key 'preserve'"):
        tc.fuse_fx(model, {"preserve": []})


@pytest.mark.parametrize(
    ("argument", "value", "expected"),
    [
        ("qconfig_mapping", 3, "a QConfigMapping"),
        ("qconfig_mapping", QConfig(MinMaxObserver, default_weight_observer), "a QConfigMapping"),
        ("prepare_custom_config", [nn.LSTM], "a PrepareCustomConfig"),
        ("prepare_custom_config", ConvertCustomConfig(), "a PrepareCustomConfig"),
        ("backend_config", "native", "a BackendConfig"),
    ],
)
def test_a_setting_of_the_wrong_type(argument: str, value: Any, expected: str) -> None:
    model = Model()
    arguments = {"qconfig_mapping": MAPPING, argument: value}
    with refused(model, ConfigError, argument, expected, type(value).__name__):
        tc.prepare_fx(model, example_inputs=good_inputs(), **arguments)


@pytest.mark.parametrize(
    "mapping",
    [
        {"object_type": [(nn.Linear,)]},
        {"module_name": 3},
        {"": "x86"},
        {"module_name_regex": [("(", QConfig(MinMaxObserver, default_weight_observer))]},
        QConfigMapping().set_global(QConfig(lambda: 3, default_weight_observer)),
    ],
    ids=["pair", "list", "value", "regex", "constructor"],
)
def test_a_mapping_that_cannot_be_read(mapping: Any) -> None:
    model = Model()
    with refused(model, ConfigError):
        tc.prepare_fx(model, mapping, good_inputs(), MAP_LSTM)


# After failures


@pytest.mark.filterwarnings("ignore")
def test_nothing_is_left_behind_by_failures() -> None:
    """The next call returns what it would have returned without them."""
    model = Model().eval()
    expected = quantized_output(model)
    for fail in (
        lambda: at_once(tc.prepare_fx)(
            model, MAPPING, (torch.randn(5, 3, INPUTS + 1), torch.zeros(INPUTS)), MAP_LSTM
        ),
        lambda: tc.prepare_fx(BranchOnValue(), MAPPING, good_inputs(), MAP_LSTM),
        lambda: tc.prepare_fx(model, {"modul_name": []}, good_inputs(), MAP_LSTM),
        lambda: tc.convert_fx(model),
    ):
        with pytest.raises(TorchQCompatError):
            fail()
        assert int((quantized_output(model) != expected).sum()) == 0


def quantized_output(model: nn.Module) -> Tensor:
    torch.manual_seed(0)
    inputs = good_inputs()
    prepared = tc.prepare_fx(model, MAPPING, inputs, MAP_LSTM)
    calibrate(prepared, [inputs])
    result: Tensor = tc.convert_fx(prepared)(*inputs)
    return result


def test_an_error_prints_problem_and_hint() -> None:
    with pytest.raises(InputError) as caught:
        at_once(tc.prepare_fx)(Model(), MAPPING)  # type: ignore[call-arg]
    assert re.fullmatch(r"example_inputs is missing: .*\nHint: pass a tuple .*", str(caught.value))
    assert f"{caught.value.message}\nHint: {caught.value.hint} [TQ902]" == str(caught.value)


def test_an_empty_batch_of_a_dynamic_linear_names_it() -> None:
    """There are no values to choose qparams from, and the nodes that choose them belong to no module. The
    packed kernels accept an empty batch, as the float model does."""
    model = nn.Sequential(nn.Identity(), nn.Sequential(nn.Linear(4, 4), nn.ReLU())).eval()
    mapping = QConfigMapping().set_global(default_dynamic_qconfig)
    prepared = tc.prepare_fx(model, mapping, (torch.randn(3, 4),))
    with pytest.raises(tc.CallError, match=r"failed at '1\.0' \(choose_qparams"):
        tc.convert_to_reference_fx(prepared)(torch.randn(0, 4))
    assert tc.convert_fx(prepared)(torch.randn(0, 4)).shape == (0, 4)


class WithState(nn.Module):
    def __init__(self, recurrent: type[nn.Module]) -> None:
        super().__init__()
        self.rnn = recurrent(4, 4)

    def forward(self, x: Tensor, state: Any) -> Any:
        return self.rnn(x, state)


@pytest.mark.parametrize("recurrent", [nn.LSTM, nn.GRU, nn.GRUCell])
def test_a_prepared_model_refuses_states_of_another_float_dtype(recurrent: type[nn.Module]) -> None:
    """The float model refuses them too; the prepared model used to compute with them."""
    rows = () if recurrent is nn.GRUCell else (1,)
    state: Any = torch.zeros(*rows, 3, 4)
    wider: Any = state.double()
    if recurrent is nn.LSTM:
        state, wider = (state, state), (wider, wider)
    x = torch.randn(3, 4) if recurrent is nn.GRUCell else torch.randn(5, 3, 4)
    config = tc.get_default_prepare_custom_config()
    prepared = tc.prepare_fx(WithState(recurrent).eval(), MAPPING, (x, state), config)
    prepared(x, state)
    with pytest.raises(
        tc.CustomModuleError, match=r"'rnn' is not valid: .* must be torch.float32 like the input"
    ):
        prepared(x, wider)
