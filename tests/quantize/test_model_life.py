"""Prepared and converted models behave like the model they came from."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import (
    MinMaxObserver,
    QConfig,
    QConfigMapping,
    default_weight_observer,
    disable_observer,
    float16_dynamic_qconfig,
    get_default_qat_qconfig_mapping,
    get_default_qconfig_mapping,
)
from torch.fx import GraphModule

import torchq_compat as tc
from tests.helpers.histograms import coarse_qconfig_mapping
from tests.helpers.once import made_once
from tests.helpers.oracle import MAP_LSTM, by_fx, by_us, calibrate, leaves, sqnr
from torchq_compat.errors import CheckpointError
from torchq_compat.model.graph_module import QuantizationGraphModule

INPUTS, HIDDEN = 8, 16
MAPPING = QConfigMapping().set_global(QConfig(MinMaxObserver, default_weight_observer))


class Tagger(nn.Module):
    """Batch first, state omitted, with a classifier, as in most scripts."""

    def __init__(self, *, dropout: float = 0.0, **lstm: Any) -> None:
        super().__init__()
        self.inp = nn.Linear(INPUTS, INPUTS)
        self.lstm = nn.LSTM(INPUTS, HIDDEN, batch_first=True, **lstm)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(HIDDEN * (2 if self.lstm.bidirectional else 1), 5)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lstm(torch.relu(self.inp(x)))
        return self.out(self.dropout(y))


def batches(count: int = 3, size: int = 8, steps: int = 6) -> list[tuple[Tensor]]:
    return [(torch.randn(size, steps, INPUTS),) for _ in range(count)]


def quantized(
    model: nn.Module, data: list[Any], mapping: QConfigMapping = MAPPING
) -> tuple[GraphModule, GraphModule]:
    return by_us(model.eval(), mapping, data, MAP_LSTM)


def assert_equal_bits(a: Tensor, b: Tensor) -> None:
    differing = int((a != b).sum())
    assert a.shape == b.shape
    assert differing == 0


def is_close(a: Tensor, b: Tensor) -> bool:
    return float((a - b).abs().max()) < 1e-5


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@made_once
def quantized_tagger() -> tuple[nn.Module, GraphModule, GraphModule]:
    model = Tagger(bidirectional=True)
    return model, *quantized(model, batches())


@pytest.fixture
def tagger() -> tuple[nn.Module, GraphModule, GraphModule]:
    """Return (float, prepared, converted)."""
    return quantized_tagger()


class Life(NamedTuple):
    """A model of one direction at each stage."""

    model: nn.Module
    data: list[tuple[Tensor]]
    prepared: GraphModule
    calibrated: GraphModule
    converted: GraphModule


def mapping_of(backend: str) -> QConfigMapping:
    return MAPPING if backend == "minmax" else coarse_qconfig_mapping(backend)


@made_once
def prepared_tagger(backend: str, number: int) -> tuple[nn.Module, GraphModule]:
    """Return (float, prepared); every ``number`` has weights of its own."""
    model = Tagger().eval()
    return model, tc.prepare_fx(model, mapping_of(backend), batches(1)[0], MAP_LSTM)


@made_once
def life(backend: str) -> Life:
    model, prepared = prepared_tagger(backend, 0)
    data, calibrated = batches(size=4, steps=3), copy.deepcopy(prepared)
    calibrate(calibrated, data)
    return Life(model, data, prepared, calibrated, tc.convert_to_reference_fx(calibrated))


def saved(state: dict[str, Any]) -> dict[str, Any]:
    """Return ``state`` saved to a file and loaded, as in a script."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


# Sizes


@pytest.mark.parametrize("example", [(1, 1), (1, 6), (4, 1), (3, 6), (4, 4), (INPUTS, INPUTS)])
def test_any_batch_and_length_whatever_the_example_was(
    example: tuple[int, int], subtests: pytest.Subtests
) -> None:
    """torch.export fixes sizes 0 and 1, and treats equal sizes as one, unless told otherwise."""
    model = Tagger().eval()
    prepared = tc.prepare_fx(model, MAPPING, (torch.randn(*example, INPUTS),), MAP_LSTM)
    calibrate(prepared, batches())
    converted = tc.convert_fx(prepared)
    for size, steps in [(1, 1), (1, 9), (5, 1), (8, 6), (13, 11)]:
        with subtests.test(size=size, steps=steps):
            x = torch.randn(size, steps, INPUTS)
            assert is_close(prepared(x), model(x))
            assert converted(x).shape == (size, steps, 5)
            assert 22 < sqnr(model(x), converted(x)) < 60


LSTMS: list[dict[str, Any]] = [
    {},
    {"num_layers": 2},
    {"bidirectional": True},
    {"num_layers": 2, "bidirectional": True, "bias": False},
    {"num_layers": 2, "dropout": 0.5},
    {"proj_size": 5},
]


@pytest.mark.parametrize("backend", ["x86", "qnnpack"])
def test_prepared_computes_what_the_float_model_computes(backend: str, subtests: pytest.Subtests) -> None:
    class Everything(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstms = nn.ModuleList(nn.LSTM(INPUTS, HIDDEN, **lstm) for lstm in LSTMS)

        def forward(self, x: Tensor) -> Any:
            return [lstm(x) for lstm in self.lstms]

    model = Everything().eval()
    mapping = get_default_qconfig_mapping(backend)
    prepared = tc.prepare_fx(model, mapping, (torch.randn(2, 3, INPUTS),), MAP_LSTM)
    for x in (torch.randn(7, 4, INPUTS), torch.randn(1, 1, INPUTS)):
        for lstm, found, expected in zip(LSTMS, prepared(x), model(x), strict=True):
            with subtests.test(lstm=lstm, shape=x.shape):
                for mine, exact in zip(leaves(found), leaves(expected), strict=True):
                    assert float((mine - exact).abs().max()) < 1e-5
                    assert float(exact.detach().abs().max()) > 1e-2


@pytest.mark.parametrize("example_steps", [1, 6])
def test_unbatched_input(example_steps: int) -> None:
    """FX returns (T, T, H) for (T, H)."""

    class Unbatched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(INPUTS, HIDDEN)

        def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            return self.lstm(x)

    model = Unbatched()
    prepared = tc.prepare_fx(model.eval(), MAPPING, (torch.randn(example_steps, INPUTS),), MAP_LSTM)
    calibrate(prepared, [(torch.randn(40, INPUTS),)])
    converted = tc.convert_fx(prepared)
    x = torch.randn(9, INPUTS)
    for exact, mine, result in zip(leaves(model(x)), leaves(prepared(x)), leaves(converted(x)), strict=True):
        assert mine.shape == result.shape == exact.shape
        assert is_close(mine, exact)
        assert 22 < sqnr(exact, result) < 60


# train() and eval()


def spread(model: nn.Module, x: Tensor) -> float:
    """Return how far apart two runs on the same input are."""
    return float((model(x) - model(x)).abs().max())


@pytest.mark.parametrize(
    "dropout", [{"dropout": 0.5}, {"dropout": 0.0, "lstm_dropout": 0.5}], ids=["module", "between layers"]
)
def test_dropout_follows_train_and_eval(dropout: dict[str, float]) -> None:
    """FX drops the dropout between the layers, with a warning."""
    model = Tagger(num_layers=2, dropout=dropout["dropout"])
    model.lstm.dropout = dropout.get("lstm_dropout", 0.0)
    x = torch.randn(4, 7, INPUTS)
    for graph_module in quantized(model, batches()):
        expected = graph_module(x)
        for _ in range(2):
            assert graph_module.train() is graph_module
            assert graph_module.training
            assert all(m.training for m in graph_module.modules())
            assert spread(graph_module, x) > 0.01
            assert graph_module.eval() is graph_module
            assert not any(m.training for m in graph_module.modules())
            assert_equal_bits(graph_module(x), expected)
        graph_module.train(False)
        assert_equal_bits(graph_module(x), expected)


def test_a_model_in_training_mode_is_observed_in_evaluation_mode() -> None:
    model = Tagger(dropout=0.5).train()
    x = torch.randn(4, 7, INPUTS)
    prepared = tc.prepare_fx(model, MAPPING, (x,), MAP_LSTM)
    assert model.training
    assert spread(prepared, x) == 0
    assert is_close(prepared(x), model.eval()(x))


def test_prepared_and_converted_say_they_are_in_evaluation_mode(
    tagger: tuple[nn.Module, GraphModule, GraphModule],
) -> None:
    for graph_module in tagger[1:]:
        assert {path: m.training for path, m in graph_module.named_modules() if m.training} == {}


# deepcopy


def test_a_copy_gives_the_same_results_and_keeps_call_forms_train_and_explain() -> None:
    """The originals are no copies themselves, unlike ``tagger``."""
    x = torch.randn(3, 9, INPUTS)
    for original in quantized_tagger.__wrapped__()[1:]:  # type: ignore[attr-defined]
        twin = copy.deepcopy(original)
        assert isinstance(twin, QuantizationGraphModule)
        assert_equal_bits(twin(x), original(x))
        assert_equal_bits(copy.deepcopy(twin)(x), original(x))
        assert_equal_bits(twin(x=x), original(x))
        assert tc.explain(twin).as_dicts() == tc.explain(original).as_dicts()
        assert twin.train().eval() is twin


def test_a_copy_shares_nothing_with_its_original(tagger: tuple[nn.Module, GraphModule, GraphModule]) -> None:
    _, prepared, converted = tagger
    x = torch.randn(3, 9, INPUTS)
    before = copy.deepcopy(prepared.state_dict())
    twin = copy.deepcopy(prepared)
    calibrate(twin, [(10 * x,)])
    assert all(torch.equal(value, before[name]) for name, value in prepared.state_dict().items())
    assert any(not torch.equal(value, before[name]) for name, value in twin.state_dict().items())
    assert_equal_bits(tc.convert_to_reference_fx(prepared)(x), converted(x))
    assert not torch.equal(tc.convert_to_reference_fx(twin)(x), converted(x))


class Tied(nn.Module):
    """Weights that a recurrent module shares with what stands outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(INPUTS, HIDDEN, 2, bidirectional=True)
        self.cell, self.attention = nn.GRUCell(INPUTS, HIDDEN), nn.MultiheadAttention(INPUTS, 2)
        self.out = nn.Linear(INPUTS, 4 * HIDDEN)
        self.out.weight = self.lstm.weight_ih_l0

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lstm(x)
        attended, _ = self.attention(x, x, x)
        return torch.cat([y, self.out(x), attended, self.cell(x[0]).expand(len(x), -1, -1)], -1)


@pytest.mark.parametrize(
    ("prepare", "switched_off", "convert"),
    [
        (tc.prepare_fx, (), tc.convert_fx),
        (tc.prepare_qat_fx, ("out",), tc.convert_to_reference_fx),
    ],
)
def test_converted_shares_nothing_with_prepared(
    prepare: Callable[..., GraphModule], switched_off: tuple[str, ...], convert: Callable[..., GraphModule]
) -> None:
    """Not even where convert reads the weights of prepared, and copies none of them beforehand."""
    model, x = Tied(), torch.randn(5, 3, INPUTS)
    is_qat = prepare is tc.prepare_qat_fx
    mapping = get_default_qat_qconfig_mapping() if is_qat else coarse_qconfig_mapping("x86")
    prepared = prepare(model.train(is_qat), mapping, (x,), tc.get_default_prepare_custom_config())
    prepared(x)
    prepared.eval().apply(disable_observer)  # type: ignore[arg-type]
    expected, before = prepared(x), copy.deepcopy(prepared.state_dict())
    off = copy.deepcopy(mapping)
    for name in switched_off:
        off.set_module_name(name, None)
    converted = convert(prepared, qconfig_mapping=off if switched_off else None)
    held = {tensor.data_ptr() for tensor in leaves_of(prepared)}
    assert held.isdisjoint(tensor.data_ptr() for tensor in leaves_of(converted))
    with torch.no_grad():
        for tensor in leaves_of(converted):
            tensor.zero_()
    assert all(torch.equal(value, before[name]) for name, value in prepared.state_dict().items())
    assert_equal_bits(prepared(x), expected)


def leaves_of(model: nn.Module) -> list[Tensor]:
    return [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.numel() > 1]


def test_a_copy_of_prepared_converts_to_the_same(tagger: tuple[nn.Module, GraphModule, GraphModule]) -> None:
    _, prepared, converted = tagger
    x = torch.randn(3, 9, INPUTS)
    assert_equal_bits(tc.convert_to_reference_fx(copy.deepcopy(prepared))(x), converted(x))


# state_dict


@pytest.mark.parametrize("backend", ["x86", "qnnpack", "minmax"])
def test_prepared_state_loads_into_a_second_prepared_model(backend: str) -> None:
    """The loaded state replaces what the second model observed; x86 has per-channel weight observers."""
    first, (_, fresh) = life.itself(backend), prepared_tagger(backend, 1)
    prepared, converted = copy.deepcopy(first.calibrated), first.converted
    calibrated = copy.deepcopy(fresh)
    calibrate(calibrated, [(5 * x,) for (x,) in batches(1)])
    x = torch.randn(3, 9, INPUTS)
    state = saved(prepared.state_dict())
    for second in (fresh, calibrated):
        missing, unexpected = second.load_state_dict(copy.deepcopy(state))
        assert (missing, unexpected) == ([], [])
        assert_equal_bits(tc.convert_to_reference_fx(second)(x), converted(x))
    # From here on all models observe x as well.
    result = prepared(x)
    expected = tc.convert_fx(prepared)(x)
    for second in (fresh, calibrated):
        assert_equal_bits(second(x), result)
        assert_equal_bits(tc.convert_fx(second)(x), expected)


class StateGiven(nn.Module):
    """A model with the state as an argument, the only form FX accepts."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(INPUTS, HIDDEN)
        self.out = nn.Linear(HIDDEN, 5)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Tensor:
        return self.out(self.lstm(x, (h, c))[0])


@pytest.mark.parametrize("quantize", [by_fx, by_us], ids=["FX", "ours"])
def test_converted_state_loads_into_a_second_converted_model(quantize: Callable[..., Any]) -> None:
    """How FX models were deployed: the same code prepares and converts again, then loads the saved state. In
    FX the scales are buffers, so the state contains them."""
    data = [(steps(), *states()) for _ in range(3)]
    _, converted = quantize(StateGiven().eval(), MAPPING, data, MAP_LSTM)
    torch.manual_seed(1)
    _, second = quantize(StateGiven().eval(), MAPPING, [(3 * x, h, c) for x, h, c in data], MAP_LSTM)
    args = data[0]
    assert sqnr(converted(*args), second(*args)) < 10
    second.load_state_dict(copy.deepcopy(converted.state_dict()))
    assert_equal_bits(second(*args), converted(*args))


def test_converted_state_with_float16_loads() -> None:
    x = torch.randn(3, 4)
    mapping = QConfigMapping().set_global(float16_dynamic_qconfig)
    first, second = (
        tc.convert_fx(tc.prepare_fx(nn.Sequential(nn.Linear(4, 4)).eval(), mapping, (x,))) for _ in range(2)
    )
    assert sqnr(first(x), second(x)) < 10
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert_equal_bits(second(x), first(x))


def test_a_second_converted_model_of_the_same_float_model_is_equal() -> None:
    made = life.itself("minmax")
    x = torch.randn(3, 9, INPUTS)
    first, second = made.converted, quantized(made.model, made.data)[1]
    assert_equal_bits(first(x), second(x))
    assert first.state_dict().keys() == second.state_dict().keys()


# Structure of arguments and results


class Pair(NamedTuple):
    tokens: Tensor
    state: tuple[Tensor, Tensor]


class Result(NamedTuple):
    logits: Tensor
    rest: dict[str, Any]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(INPUTS, HIDDEN)
        self.out = nn.Linear(HIDDEN, 5)


class FromDict(Recurrent):
    def forward(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        y, (h, c) = self.lstm(inputs["x"], inputs["state"])
        return {"logits": self.out(y), "h": h, "c": c}


class FromNamedTuple(Recurrent):
    def forward(self, pair: Pair) -> Result:
        y, state = self.lstm(pair.tokens, pair.state)
        return Result(self.out(y), {"state": state, "none": None, "list": [y, 3]})


class FromNested(Recurrent):
    def forward(self, x: Tensor, state: list[Any]) -> tuple[Any, ...]:
        y, last = self.lstm(x, (state[0]["h"], state[1]))
        return [y, (last,)], self.out(y)


def states(size: int = 4) -> tuple[Tensor, Tensor]:
    return 0.3 * torch.randn(1, size, HIDDEN), 0.3 * torch.randn(1, size, HIDDEN)


def steps() -> Tensor:
    return torch.randn(6, 4, INPUTS)


def nested_arguments() -> tuple[Tensor, list[Any]]:
    h, c = states()
    return steps(), [{"h": h}, c]


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (FromDict, lambda: ({"x": steps(), "state": states()},)),
        (FromNamedTuple, lambda: (Pair(steps(), states()),)),
        (FromNested, nested_arguments),
    ],
)
def test_structures_of_arguments_and_results(
    make: Callable[[], nn.Module], arguments: Callable[[], Any]
) -> None:
    model = make()
    args = arguments()
    expected = model(*args)
    for graph_module in quantized(model, [arguments() for _ in range(3)]):
        result = graph_module(*args)
        assert same_structure(result, expected)
        for mine, exact in zip(leaves(result), leaves(expected), strict=True):
            assert sqnr(exact, mine) > 22


def same_structure(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype
    if isinstance(a, dict):
        return list(a) == list(b) and all(same_structure(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same_structure, a, b))
    return bool(a == b)


class Defaults(Recurrent):
    def forward(
        self,
        x: Tensor,
        h: Tensor | None = None,
        c: Tensor | None = None,
        scale: float = 2.5,
        *,
        shift: float = 1.5,
    ) -> Tensor:
        y, _ = self.lstm(x, None if h is None or c is None else (h, c))
        return self.out(y) * scale + shift


@made_once
def quantized_defaults(*, given: bool) -> tuple[nn.Module, tuple[GraphModule, GraphModule]]:
    """Return (float, (prepared, converted)); with ``given``, the example gives the state."""
    model = Defaults()
    return model, quantized(model, [(steps(), *(states() if given else ())) for _ in range(3)])


def test_called_by_name() -> None:
    x, (h, c) = steps(), states()
    for graph_module in quantized_defaults(given=True)[1]:
        expected = graph_module(x, h, c)
        assert_equal_bits(graph_module(x, c=c, h=h), expected)
        assert_equal_bits(graph_module(c=c, x=x, h=h), expected)


def test_arguments_left_at_their_default() -> None:
    """The example omits them, and so do the calls; passing the default value changes nothing."""
    model, graph_modules = quantized_defaults(given=False)
    x = steps()
    for graph_module in graph_modules:
        expected = graph_module(x)
        assert sqnr(model(x), expected) > 25
        assert_equal_bits(graph_module(x, None, None), expected)
        assert_equal_bits(graph_module(x=x, scale=float("2.5")), expected)
        assert_equal_bits(graph_module(x, shift=float("1.5")), expected)


class Star(Recurrent):
    def forward(self, x: Tensor, *state: Tensor) -> Tensor:
        return self.out(self.lstm(x, (state[0], state[1]))[0])


def test_arguments_taken_by_a_star() -> None:
    model = Star().eval()
    prepared = tc.prepare_fx(model, MAPPING, (steps(), *states()), MAP_LSTM)
    args = (torch.randn(9, 2, INPUTS), *states(2))
    assert is_close(prepared(*args), model(*args))


def test_one_tensor_given_twice_in_the_example() -> None:
    """torch.export treats equal tensors as one input; here these are h0 and c0."""
    model, zeros = StateGiven().eval(), torch.zeros(1, 4, HIDDEN)
    args = steps(), *states()
    prepared = tc.prepare_fx(model, MAPPING, (steps(), zeros, zeros), MAP_LSTM)
    assert is_close(prepared(*args), model(*args))
    assert not is_close(prepared(*args), model(args[0], args[2], args[2]))


@pytest.mark.parametrize("kwargs", [{"scale": 3.0}, {"shift": 0.0}, {"unknown": 1}, {"x": 1}], ids=str)
def test_an_argument_that_capture_fixed_is_refused(kwargs: dict[str, Any]) -> None:
    (name,) = kwargs
    for graph_module in quantized_defaults(given=False)[1]:
        with pytest.raises(tc.TorchQCompatError, match=f"(?s)'{name}'.*Hint:"):
            graph_module(steps(), **kwargs)


def test_a_missing_argument_is_refused() -> None:
    for graph_module in quantized_defaults(given=True)[1]:
        with pytest.raises(tc.TorchQCompatError, match=r"(?s)missing argument 'c'.*Hint:"):
            graph_module(steps(), states()[0])


# Calibration


@pytest.mark.parametrize("backend", ["minmax", "qnnpack"])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_calibration_in_every_grad_mode(
    context: Callable[[], AbstractContextManager[None]], backend: str
) -> None:
    """The second half runs under no_grad: observers must not keep inference tensors."""
    _, data, fresh, _, expected = life.itself(backend)
    prepared = copy.deepcopy(fresh)
    with context():
        for batch in data[:2]:
            prepared(*batch)
    calibrate(prepared, data[2:])
    x = torch.randn(3, 9, INPUTS)
    assert_equal_bits(tc.convert_to_reference_fx(prepared)(x), expected(x))
    assert_equal_bits(tc.convert_to_reference_fx(copy.deepcopy(prepared))(x), expected(x))


def test_converted_in_inference_mode(tagger: tuple[nn.Module, GraphModule, GraphModule]) -> None:
    _, _, converted = tagger
    x = torch.randn(3, 9, INPUTS)
    with torch.no_grad():
        expected = converted(x)
    with torch.inference_mode():
        assert_equal_bits(converted(x), expected)


@made_once
def per_channel() -> tuple[GraphModule, GraphModule]:
    mapping = get_default_qconfig_mapping("x86")
    return by_us(Tagger().eval(), mapping, batches(2), MAP_LSTM)


def altered(state: dict[str, Tensor], kind: str) -> dict[str, dict[str, Tensor]]:
    """Return what is wrong -> a state with one such value."""
    name = next(each for each in state if each.endswith(kind))
    value = state[name]

    def row(column: int, number: float) -> Tensor:
        rows = value.clone()
        rows[-1, column] = number
        return rows

    if kind == "_zero_point_0":
        changed = {f"{number}": torch.full_like(value, number) for number in (128, -129, 2**40)}
    elif kind == "_extra_state":
        numbers = [
            (0, math.nan),
            (0, 0.0),
            (1, 2.0**40),
            (1, -(2.0**40)),
            (1, 0.5),
            (2, 2.0**40),
            (3, -(2.0**40)),
        ]
        changed = {f"column {column} {number}": row(column, number) for column, number in numbers}
        changed |= {"no dimension": value[0, 0], "a column more": F.pad(value, (0, 1))}
        changed |= {"of 8 bits": value.to(torch.float8_e5m2)}
    else:
        changed = {f"{number}": torch.full_like(value, number) for number in (math.nan, math.inf, 0.0, -1.0)}
        # Wide ones are infinite and zero in the model.
        changed |= {
            f"{number}": torch.full_like(value, number, dtype=torch.float64) for number in (1e300, 1e-300)
        }
        changed |= {"of 8 bits": torch.zeros_like(value, dtype=torch.float8_e5m2)}
    changed["huge"] = torch.ones((), dtype=value.dtype).expand(2**40)
    return {label: {**state, name: wrong} for label, wrong in changed.items()}


@pytest.mark.parametrize("kind", ["_zero_point_0", "_extra_state", "_scale_0"])
def test_a_state_with_impossible_qparams_or_shapes_is_refused_by_name(
    kind: str, subtests: pytest.Subtests
) -> None:
    _, converted = per_channel.itself()
    (x,) = batches(1)[0]
    before, result = dict(converted.state_dict()), converted(x)
    for label, state in altered(before, kind).items():
        with subtests.test(label), pytest.raises(CheckpointError) as refused:
            converted.load_state_dict(state)
        assert kind in str(refused.value) or "per-tensor qparams" in str(refused.value)
    assert_equal_bits(converted(x), result)


def test_what_is_saved_is_loaded_without_running_code() -> None:
    prepared, converted = per_channel.itself()
    dynamic = tc.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)).eval())
    for model in (prepared, converted, tc.convert_to_reference_fx(prepared), dynamic):
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
        assert state.keys() == model.state_dict().keys()
        model.load_state_dict(state)
