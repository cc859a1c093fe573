"""LSTM models that FX quantizes wrongly or not at all: FX's behaviour, asserted beside this package's.

B1 to B23 are rows of the table "Where upstream is wrong". Every number of FX is from a live run.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx as fx
from torch import Tensor, nn
from torch.ao.quantization import MinMaxObserver, QConfig, QConfigMapping, default_weight_observer
from torch.fx import GraphModule

import torchq_compat as tc
from tests.helpers.once import made_once
from tests.helpers.oracle import MAP_LSTM, by_fx, by_us, calibrate, leaves, sqnr

INPUTS, HIDDEN = 8, 16
#: Exact minima and maxima: errors come from the graph, not from a histogram's clipping.
MAPPING = QConfigMapping().set_global(QConfig(MinMaxObserver, default_weight_observer))

Batch = tuple[Tensor, ...]


def batch(steps: int, size: int, *, rows: int = 1, spread: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Return x (T, B, I) of standard deviation ``spread``, h and c (L*D, B, H)."""
    x = spread * torch.randn(steps, size, INPUTS)
    return x, 0.3 * torch.randn(rows, size, HIDDEN), 0.3 * torch.randn(rows, size, HIDDEN)


def calibration(**kwargs: Any) -> list[tuple[Tensor, Tensor, Tensor]]:
    return [batch(6, 8, **kwargs) for _ in range(3)]


def quality(exact: Any, result: Any) -> list[float]:
    """Return the SQNR in dB of every tensor of a nested result."""
    return [sqnr(a, b) for a, b in zip(leaves(exact), leaves(result), strict=True)]


def assert_right(model: nn.Module, batches: list[Any], args: Batch) -> Any:
    """Return our results, of a quantized model and close to float in every one, at unprepared sizes."""
    _, ours = by_us(model, MAPPING, batches, MAP_LSTM)
    with torch.no_grad():
        results = ours(*args)
        found = quality(model(*args), results)
    assert all(25 <= db < 60 for db in found), found
    return results


class OneLSTM(nn.Module):
    def __init__(self, num_layers: int = 1, *, bidirectional: bool = False) -> None:
        super().__init__()
        self.lstm = nn.LSTM(INPUTS, HIDDEN, num_layers, bidirectional=bidirectional)


def build(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().eval()


def scale_parameters(model: nn.Module, factors: dict[str, float]) -> None:
    """Multiply every parameter whose name ends in a key of ``factors``."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            for end, factor in factors.items():
                if name.endswith(end):
                    parameter.mul_(factor)


# B1: FX reroutes the tuple through dequantize stubs and loses track of a second subscript.


class TwoSubscripts(OneLSTM):
    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        r = self.lstm(x, (h, c))
        return r[0], r[1][0], r[1][1]


class SameStateTwice(OneLSTM):
    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Tensor:
        o = self.lstm(x, (h, c))
        return o[1][0] + o[1][0]


class BothStates(OneLSTM):
    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Tensor:
        o = self.lstm(x, (h, c))
        return o[1][0] + o[1][1]


@pytest.mark.parametrize("make", [TwoSubscripts, BothStates])
def test_b1_two_subscripts_of_one_layer(make: Callable[[], nn.Module]) -> None:
    model = build(make)
    batches = calibration()
    with pytest.raises(IndexError, match="index 1 is out of bounds for dimension 0 with size 1"):
        by_fx(model, MAPPING, batches, MAP_LSTM)
    assert_right(model, batches, batch(9, 3))


def test_b1_two_subscripts_of_two_layers() -> None:
    """FX silently returns c_n[1], the last layer's row, as c_n."""
    model = build(lambda: TwoSubscripts(2))
    batches = calibration(rows=2)
    _, theirs = by_fx(model, MAPPING, batches, MAP_LSTM)
    args = batch(9, 3, rows=2)
    c_n, fx_c_n = model(*args)[2], theirs(*args)[2]
    assert (c_n.shape, fx_c_n.shape) == ((2, 3, HIDDEN), (3, HIDDEN))
    assert sqnr(c_n[1], fx_c_n) > 25
    assert_right(model, batches, args)


@pytest.mark.parametrize(("make", "rows"), [(SameStateTwice, 1), (SameStateTwice, 2), (BothStates, 2)])
def test_b1_states_added(make: Callable[..., nn.Module], rows: int) -> None:
    """FX silently adds another value."""
    model = build(lambda: make(rows))
    batches = calibration(rows=rows)
    _, theirs = by_fx(model, MAPPING, batches, MAP_LSTM)
    args = batch(9, 3, rows=rows)
    assert quality(model(*args), theirs(*args))[0] < 8
    assert_right(model, batches, args)


# B2: one LSTM, several calls.


class CalledTwice(OneLSTM):
    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, (h, c) = self.lstm(x, (h, c))
        z, (h, c) = self.lstm(0.5 * x, (h, c))
        return y + z, h, c


class Aliased(OneLSTM):
    def __init__(self) -> None:
        super().__init__()
        self.other = self.lstm

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, (h, c) = self.lstm(x, (h, c))
        z, (h, c) = self.other(0.5 * x, (h, c))
        return y + z, h, c


@pytest.mark.parametrize("make", [CalledTwice, Aliased])
def test_b2_called_twice(make: Callable[[], nn.Module]) -> None:
    model = build(make)
    batches = calibration()
    with pytest.raises(AttributeError, match="'tuple' object has no attribute 'numel'"):
        by_fx(model, MAPPING, batches, MAP_LSTM)
    assert_right(model, batches, batch(9, 3))


# B3: every way to pass the state except as a tuple of two tensors.


class Omitted(OneLSTM):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, (h, _) = self.lstm(x)
        return y, h


class AsNone(OneLSTM):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, (h, _) = self.lstm(x, None)
        return y, h


class AsList(OneLSTM):
    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        y, (h, _) = self.lstm(x, [h, c])
        return y, h


class AsKeyword(OneLSTM):
    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        y, (h, _) = self.lstm(x, hx=(h, c))
        return y, h


class ForwardedWhole(OneLSTM):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.LSTM(INPUTS, HIDDEN)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        y, state = self.lstm(x, (h, c))
        z, state = self.second(x, state)
        return y + z, state


class TakeOutput(nn.Module):
    def forward(self, result: tuple[Tensor, Any]) -> Tensor:
        return result[0]


def sequential() -> nn.Module:
    return nn.Sequential(nn.LSTM(INPUTS, HIDDEN), TakeOutput(), nn.Linear(HIDDEN, INPUTS))


NOT_A_TUPLE = (AssertionError, "Expected LSTM custom module inputs to be")


@pytest.mark.parametrize(
    ("make", "arguments", "failure"),
    [
        (Omitted, 1, NOT_A_TUPLE),
        (AsNone, 1, NOT_A_TUPLE),
        (AsList, 3, NOT_A_TUPLE),
        (AsKeyword, 3, (TypeError, "unexpected keyword argument 'hx'")),
        (ForwardedWhole, 3, NOT_A_TUPLE),
        (sequential, 1, NOT_A_TUPLE),
    ],
)
def test_b3_call_forms(
    make: Callable[[], nn.Module], arguments: int, failure: tuple[type[Exception], str]
) -> None:
    model = build(make)
    batches = [args[:arguments] for args in calibration()]
    with pytest.raises(failure[0], match=failure[1]):
        by_fx(model, MAPPING, batches, MAP_LSTM)
    assert_right(model, batches, batch(9, 3)[:arguments])


# B4: FX looks for the observer of an LSTM's output, but behind the LSTM it finds that of the input.


class FollowedBy(OneLSTM):
    def __init__(self, op: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.op = op

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Tensor:
        return self.op(self.lstm(x, (h, c))[0])


OPS_THAT_SHARE: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda y: y.mean(0),
    "transpose": lambda y: y.transpose(0, 1),
    "permute": lambda y: y.permute(1, 0, 2),
    "reshape": lambda y: y.reshape(y.shape[0], -1),
    "torch.flatten": lambda y: torch.flatten(y, 1),
    "cat": lambda y: torch.cat([y, 0.5 * y], -1),
}
#: Not in FX's backend config, so FX handles them correctly.
OPS_THAT_DO_NOT: dict[str, Callable[[Tensor], Tensor]] = {
    "Tensor.flatten": lambda y: y.flatten(1),
    "nn.Flatten": nn.Flatten(1),
}


class SideBySide(nn.Module):
    """Models with the same inputs and nothing else in common."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> list[Any]:
        return [model(x, h, c) for model in self.models]


@made_once
def followed_by_each_op() -> tuple[nn.Module, list[Any], Batch, GraphModule]:
    """Return the model, calibration batches, arguments, and what FX makes of it; the LSTMs are equal."""
    ops = OPS_THAT_SHARE | OPS_THAT_DO_NOT
    model = SideBySide(build(functools.partial(FollowedBy, op)) for op in ops.values()).eval()
    batches = calibration(spread=12.0)
    args = batch(9, 3, spread=12.0)
    return model, batches, args, by_fx(model, MAPPING, batches, MAP_LSTM)[1]


def test_b4_output_is_not_quantized_like_the_input() -> None:
    model, batches, args, theirs = followed_by_each_op()
    found = quality(model(*args), theirs(*args))
    assert all(db < 18 for db in found[: len(OPS_THAT_SHARE)]), found
    assert_right(model, batches, args)


def test_b4_does_not_concern_ops_fx_leaves_alone() -> None:
    model, _, args, theirs = followed_by_each_op()
    found = quality(model(*args), theirs(*args))
    assert len(found) == len(OPS_THAT_SHARE) + len(OPS_THAT_DO_NOT)
    assert all(db > 25 for db in found[len(OPS_THAT_SHARE) :]), found


class StateBehindOutput(OneLSTM):
    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Tensor:
        y, (h_n, _) = self.lstm(x, (h, c))
        return torch.cat([y, h_n], 0)


def test_b4_output_and_state_in_one_cat() -> None:
    model = build(StateBehindOutput)
    batches = calibration(spread=12.0)
    _, theirs = by_fx(model, MAPPING, batches, MAP_LSTM)
    args = batch(9, 3, spread=12.0)
    assert quality(model(*args), theirs(*args))[0] < 18
    assert_right(model, batches, args)


class CatBehindLinear(OneLSTM):
    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(INPUTS, HIDDEN)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Tensor:
        return torch.cat([self.side(x), self.lstm(x, (h, c))[0]], -1)


def test_b4_drags_what_it_is_joined_with_along() -> None:
    """cat makes FX use x's observer for the Linear as well."""
    model = build(CatBehindLinear)
    scale_parameters(model, {"side.weight": 0.02})
    batches = calibration(spread=12.0)
    _, theirs = by_fx(model, MAPPING, batches, MAP_LSTM)
    args = batch(9, 3, spread=12.0)
    assert quality(model(*args), theirs(*args))[0] < 18
    assert_right(model, batches, args)


# B5: torch.cat and torch.stack of quantized tensors use the first one's qparams.


class AllResults(OneLSTM):
    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, (h_n, c_n) = self.lstm(x, (h, c))
        return y, h_n, c_n


def test_b5_both_directions() -> None:
    """FX saturates the backward output at the forward one's maximum, also in h_n and c_n."""
    model = build(lambda: AllResults(bidirectional=True))
    scale_parameters(model, {"_l0": 0.3, "_l0_reverse": 2.0})
    batches = calibration(rows=2)
    _, theirs = by_fx(model, MAPPING, batches, MAP_LSTM)
    args = batch(9, 64, rows=2)
    exact, mine, fx_result = model(*args), assert_right(model, batches, args), theirs(*args)
    backward = [result[0][..., HIDDEN:].abs().max() for result in (exact, mine, fx_result)]
    assert float(backward[2]) < 0.6 * float(backward[0])
    assert float(backward[1]) == pytest.approx(float(backward[0]), rel=0.05)
    assert all(db < 15 for db in quality(exact, fx_result))


def test_b5_layers() -> None:
    """In FX the output is right, but h_n and c_n are quantized with the first layer's qparams."""
    model = build(lambda: AllResults(2))
    scale_parameters(model, {"_l0": 0.1, "_l1": 4.0})
    batches = calibration(rows=2)
    _, theirs = by_fx(model, MAPPING, batches, MAP_LSTM)
    args = batch(9, 3, rows=2)
    output, h_n, c_n = quality(model(*args), theirs(*args))
    assert output > 25
    assert h_n < 20
    assert c_n < 20
    assert_right(model, batches, args)


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("batch_first", [False, True])
def test_b5_bidirectional_in_every_layout(num_layers: int, batch_first: bool) -> None:
    torch.manual_seed(0)
    lstm = nn.LSTM(INPUTS, HIDDEN, num_layers, bidirectional=True, batch_first=batch_first)
    model = nn.Sequential(lstm).eval()

    def arguments(steps: int, size: int) -> tuple[Tensor]:
        x = torch.randn(steps, size, INPUTS)
        return (x.transpose(0, 1).contiguous() if batch_first else x,)

    assert_right(model, [arguments(6, 8) for _ in range(3)], arguments(9, 3))


# B23: FX marks the float model and shares modules with it.


class WithLinear(OneLSTM):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(HIDDEN, 4)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Tensor:
        return self.out(self.lstm(x, (h, c))[0])


def attributes(model: nn.Module) -> dict[str, set[str]]:
    return {path: set(vars(module)) for path, module in model.named_modules()}


def storages(model: nn.Module) -> set[int]:
    tensors = (*model.parameters(), *model.buffers())
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}


def test_b23_fx_marks_and_shares_the_float_model() -> None:
    model = build(WithLinear)
    before = attributes(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = fx.prepare_fx(model, MAPPING, batch(6, 8), MAP_LSTM)
    assert hasattr(model.out, "qconfig")
    assert attributes(model) != before
    assert model.out.weight is prepared.out.weight


def test_b23_the_float_model_stays_as_it_is() -> None:
    model = build(WithLinear)
    args = batch(9, 3)
    before, state, result = attributes(model), copy.deepcopy(model.state_dict()), model(*args)
    prepared = tc.prepare_fx(model, MAPPING, batch(6, 8), MAP_LSTM)
    calibrate(prepared, calibration())
    converted = tc.convert_fx(prepared)
    assert storages(model).isdisjoint(storages(prepared) | storages(converted))
    with torch.no_grad():
        for parameter in (*prepared.parameters(), *converted.parameters()):
            parameter.add_(1)
    assert attributes(model) == before
    assert not any(hasattr(module, "qconfig") for module in model.modules())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(*args), result)


def test_b23_converting_leaves_the_prepared_model_as_it_is() -> None:
    prepared = tc.prepare_fx(build(WithLinear), MAPPING, batch(6, 8), MAP_LSTM)
    calibrate(prepared, calibration())
    args = batch(9, 3)
    state, first = copy.deepcopy(prepared.state_dict()), tc.convert_fx(prepared)
    assert storages(prepared).isdisjoint(storages(first))
    assert prepared.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in prepared.state_dict().items())
    assert torch.equal(tc.convert_fx(prepared)(*args), first(*args))
