"""Recurrent modules with a dynamic QConfig: the numbers of torch.ao's dynamic modules, at any length."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx as fx
from torch import Tensor, nn
from torch.ao.quantization import (
    QConfigMapping,
    default_dynamic_qconfig,
    float16_dynamic_qconfig,
    per_channel_dynamic_qconfig,
)
from torch.fx import GraphModule
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import torchq_compat as tc
from tests.helpers.once import made_once
from tests.helpers.oracle import MAP_LSTM, count_nodes, leaves, sqnr
from torchq_compat.support.quantized_tensors import using_engine

INPUTS, HIDDEN = 12, 24
QCONFIGS = {
    "per_tensor": default_dynamic_qconfig,
    "per_channel": per_channel_dynamic_qconfig,
    "float16": float16_dynamic_qconfig,
}
SEQUENCES = {
    "lstm": lambda: nn.LSTM(INPUTS, HIDDEN),
    "deep_lstm": lambda: nn.LSTM(INPUTS, HIDDEN, 2, bidirectional=True, batch_first=True),
    "gru": lambda: nn.GRU(INPUTS, HIDDEN),
    "deep_gru": lambda: nn.GRU(INPUTS, HIDDEN, 2, bidirectional=True),
}
CELLS = {
    "lstm_cell": lambda: nn.LSTMCell(INPUTS, HIDDEN),
    "gru_cell": lambda: nn.GRUCell(INPUTS, HIDDEN),
    "rnn_cell": lambda: nn.RNNCell(INPUTS, HIDDEN),
    "relu_cell": lambda: nn.RNNCell(INPUTS, HIDDEN, nonlinearity="relu"),
}


class Model(nn.Module):
    def __init__(self, recurrent: nn.Module) -> None:
        super().__init__()
        self.rnn = recurrent

    def forward(self, x: Tensor) -> Any:
        return self.rnn(x)


#: x86's kernels use half of the range of dynamic activations, qnnpack's the whole range.
ENGINES = ("x86", "qnnpack")


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    with using_engine(request.param):
        yield request.param


def build(make: Any) -> Model:
    torch.manual_seed(0)
    return Model(make()).eval()


def example(model: Model, steps: int = 7, batch: int = 3) -> Tensor:
    is_cell = isinstance(model.rnn, nn.RNNCellBase)
    return torch.randn(batch, INPUTS) if is_cell else torch.randn(steps, batch, INPUTS)


def by_fx(model: nn.Module, mapping: QConfigMapping, *args: Tensor) -> GraphModule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fx.convert_fx(fx.prepare_fx(copy.deepcopy(model), mapping, args))


def by_us(model: Model, mapping: QConfigMapping, x: Tensor) -> GraphModule:
    return tc.convert_to_reference_fx(tc.prepare_fx(model, mapping, (x,)))


class All(nn.Module):
    """A module of every kind; ``x`` goes through those over sequences, and ``step`` through the cells."""

    def __init__(self) -> None:
        super().__init__()
        self.rnns = nn.ModuleDict({name: build(make).rnn for name, make in (SEQUENCES | CELLS).items()})

    def forward(self, x: Tensor, step: Tensor) -> dict[str, Any]:
        return {name: rnn(step if name in CELLS else x) for name, rnn in self.rnns.items()}


def inputs_of_all(steps: int, batch: int) -> tuple[Tensor, Tensor]:
    return torch.randn(steps, batch, INPUTS), torch.randn(batch, INPUTS)


@made_once
def all_prepared(qconfig: str) -> tuple[nn.Module, GraphModule]:
    model = All().eval()
    mapping = QConfigMapping().set_global(QCONFIGS[qconfig])
    return model, tc.prepare_fx(model, mapping, inputs_of_all(7, 3))


@made_once
def all_converted(qconfig: str, engine: str) -> tuple[nn.Module, GraphModule, GraphModule]:
    """Return the float model, FX's and ours; the engine is asked while converting."""
    model, prepared = all_prepared.itself(qconfig)
    with using_engine(engine):
        theirs = by_fx(model, QConfigMapping().set_global(QCONFIGS[qconfig]), *inputs_of_all(7, 3))
        return model, theirs, tc.convert_to_reference_fx(prepared)


@pytest.mark.parametrize(
    ("engine", "qconfig"),
    [(engine, name) for engine in ENGINES for name in QCONFIGS if (engine, name) != ("qnnpack", "float16")],
    indirect=["engine"],
)
def test_numbers_of_torch_ao(qconfig: str, engine: str, subtests: pytest.Subtests) -> None:
    """float16 is not compared on qnnpack, which has no such kernels. The numbers are always the same ones: a
    hidden state midway between two integers, one in some 100,000, may go to either."""
    model, theirs, ours = all_converted.itself(qconfig, engine)
    torch.manual_seed(0)
    args = inputs_of_all(steps=11, batch=5)
    with torch.no_grad():
        exact, expected, found = (run(*args) for run in (model, theirs, ours))
    for name in (*SEQUENCES, *CELLS):
        with subtests.test(name=name):
            kind = type(theirs.get_submodule(f"rnns.{name}"))
            assert kind.__module__.startswith("torch.ao.nn.quantized.dynamic")
            values = (leaves(results[name]) for results in (exact, expected, found))
            for float_value, fx_value, value in zip(*values, strict=True):
                torch.testing.assert_close(value, fx_value, rtol=0, atol=2e-6)
                assert 30 < sqnr(float_value, value) < (90 if qconfig == "float16" else 55)


@made_once
def prepared_without_bias() -> tuple[Model, GraphModule]:
    model = build(lambda: nn.GRU(INPUTS, HIDDEN, bias=False))
    mapping = QConfigMapping().set_global(default_dynamic_qconfig)
    return model, tc.prepare_fx(model, mapping, (example(model),))


def test_without_bias_where_fx_fails(engine: str) -> None:
    model, prepared = prepared_without_bias.itself()
    x = example(model)
    with pytest.raises(KeyError, match="bias_ih_l0"):
        by_fx(model, QConfigMapping().set_global(default_dynamic_qconfig), x)
    converted = tc.convert_to_reference_fx(prepared)
    with torch.no_grad():
        assert all(30 < sqnr(a, b) < 55 for a, b in zip(leaves(model(x)), leaves(converted(x)), strict=True))


def test_projection_where_torch_ao_has_none() -> None:
    model = build(lambda: nn.LSTM(INPUTS, HIDDEN, proj_size=8))
    x = example(model)
    converted = by_us(model, QConfigMapping().set_global(default_dynamic_qconfig), x)
    with torch.no_grad():
        assert all(28 < sqnr(a, b) < 55 for a, b in zip(leaves(model(x)), leaves(converted(x)), strict=True))


def test_integer_weights_and_no_observers() -> None:
    model, prepared = all_prepared.itself("per_tensor")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        converted = tc.convert_fx(prepared)  # nothing to calibrate, so no warning
    stored = [value for value in converted.state_dict().values() if value.dtype is torch.int8]
    assert sum(value.numel() for value in stored) == sum(p.numel() for p in model.parameters() if p.dim() > 1)


@pytest.mark.slow
def test_nodes_do_not_depend_on_the_length() -> None:
    model = build(SEQUENCES["deep_gru"])
    mapping = QConfigMapping().set_global(default_dynamic_qconfig)
    counts = {count_nodes(by_us(model, mapping, example(model, steps=steps))) for steps in (2, 9, 64)}
    assert len(counts) == 1


def test_the_static_mapping_is_not_asked() -> None:
    """FX, too, quantizes a mapped LSTM dynamically if its QConfig is dynamic."""
    model = build(SEQUENCES["lstm"])
    mapping = QConfigMapping().set_global(default_dynamic_qconfig)
    x = example(model)
    converted = tc.convert_fx(tc.prepare_fx(model, mapping, (x,), MAP_LSTM))
    with torch.no_grad():
        torch.testing.assert_close(converted(x)[0], by_fx(model, mapping, x)(x)[0], rtol=0, atol=2e-6)


def test_packed_sequence(engine: str) -> None:
    _, theirs, ours = all_converted.itself("per_tensor", engine)
    packed = pack_padded_sequence(torch.randn(6, 3, INPUTS), torch.tensor([6, 4, 1]))
    with torch.no_grad():
        of_each = (m.get_submodule("rnns.lstm")(packed) for m in (theirs, ours))
        expected, found = (pad_packed_sequence(output)[0] for output, _ in of_each)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


def test_life_of_a_converted_model() -> None:
    model = build(SEQUENCES["gru"])
    mapping = QConfigMapping().set_global(per_channel_dynamic_qconfig)
    x = example(model)
    converted = by_us(model, mapping, x)
    other = by_us(Model(nn.GRU(INPUTS, HIDDEN)).eval(), mapping, x)
    assert not torch.equal(other(x)[0], converted(x)[0])
    other.load_state_dict(converted.state_dict())
    assert torch.equal(other(x)[0], converted(x)[0])
    assert torch.equal(copy.deepcopy(converted)(x)[0], converted(x)[0])
    decision = tc.explain(converted).find("rnn")[0]
    assert (decision.action.value, decision.kind) == ("quantized", "GRU")
    assert "dynamically" in decision.reason
