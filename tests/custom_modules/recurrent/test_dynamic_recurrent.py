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
from tests.helpers.oracle import MAP_LSTM, count_nodes, leaves, sqnr

INPUTS, HIDDEN = 12, 24
QCONFIGS = {
    "per_tensor": default_dynamic_qconfig,
    "per_channel": per_channel_dynamic_qconfig,
    "float16": float16_dynamic_qconfig,
}
SEQUENCES = {
    "lstm": lambda: nn.LSTM(INPUTS, HIDDEN),
    "deep lstm": lambda: nn.LSTM(INPUTS, HIDDEN, 2, bidirectional=True, batch_first=True),
    "gru": lambda: nn.GRU(INPUTS, HIDDEN),
    "deep gru": lambda: nn.GRU(INPUTS, HIDDEN, 2, bidirectional=True),
}
CELLS = {
    "lstm cell": lambda: nn.LSTMCell(INPUTS, HIDDEN),
    "gru cell": lambda: nn.GRUCell(INPUTS, HIDDEN),
    "rnn cell": lambda: nn.RNNCell(INPUTS, HIDDEN),
    "relu cell": lambda: nn.RNNCell(INPUTS, HIDDEN, nonlinearity="relu"),
}


class Model(nn.Module):
    def __init__(self, recurrent: nn.Module) -> None:
        super().__init__()
        self.rnn = recurrent

    def forward(self, x: Tensor) -> Any:
        return self.rnn(x)


ENGINES = ("x86", "qnnpack")


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    """x86's kernels use half of the range of dynamic activations, qnnpack's the whole range."""
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = request.param
    yield request.param
    torch.backends.quantized.engine = before


def build(make: Any) -> Model:
    torch.manual_seed(0)
    return Model(make()).eval()


def example(model: Model, steps: int = 7, batch: int = 3) -> Tensor:
    is_cell = isinstance(model.rnn, nn.RNNCellBase)
    return torch.randn(batch, INPUTS) if is_cell else torch.randn(steps, batch, INPUTS)


def by_fx(model: Model, mapping: QConfigMapping, x: Tensor) -> GraphModule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fx.convert_fx(fx.prepare_fx(copy.deepcopy(model), mapping, (x,)))


def by_us(model: Model, mapping: QConfigMapping, x: Tensor) -> GraphModule:
    return tc.convert_to_reference_fx(tc.prepare_fx(model, mapping, (x,)))


@pytest.mark.parametrize(
    ("engine", "qconfig"),
    [(engine, name) for engine in ENGINES for name in QCONFIGS if (engine, name) != ("qnnpack", "float16")],
    indirect=["engine"],
)
@pytest.mark.parametrize("name", [*SEQUENCES, *CELLS])
def test_numbers_of_torch_ao(name: str, qconfig: str, engine: str) -> None:
    """float16 is not compared on qnnpack, which has no such kernels."""
    model = build({**SEQUENCES, **CELLS}[name])
    mapping = QConfigMapping().set_global(QCONFIGS[qconfig])
    theirs, ours = (run(model, mapping, example(model)) for run in (by_fx, by_us))
    assert type(theirs.rnn).__module__.startswith("torch.ao.nn.quantized.dynamic")
    x = example(model, steps=11, batch=5)
    with torch.no_grad():
        exact, expected, found = leaves(model(x)), leaves(theirs(x)), leaves(ours(x))
    for float_value, fx_value, value in zip(exact, expected, found, strict=True):
        torch.testing.assert_close(value, fx_value, rtol=0, atol=2e-6)
        assert 30 < sqnr(float_value, value) < (90 if qconfig == "float16" else 55)


def test_without_bias_where_fx_fails(engine: str) -> None:
    model = build(lambda: nn.GRU(INPUTS, HIDDEN, bias=False))
    mapping = QConfigMapping().set_global(default_dynamic_qconfig)
    x = example(model)
    with pytest.raises(KeyError, match="bias_ih_l0"):
        by_fx(model, mapping, x)
    converted = by_us(model, mapping, x)
    with torch.no_grad():
        assert all(30 < sqnr(a, b) < 55 for a, b in zip(leaves(model(x)), leaves(converted(x)), strict=True))


def test_projection_where_torch_ao_has_none() -> None:
    model = build(lambda: nn.LSTM(INPUTS, HIDDEN, proj_size=8))
    x = example(model)
    converted = by_us(model, QConfigMapping().set_global(default_dynamic_qconfig), x)
    with torch.no_grad():
        assert all(28 < sqnr(a, b) < 55 for a, b in zip(leaves(model(x)), leaves(converted(x)), strict=True))


def test_integer_weights_and_no_observers() -> None:
    model = build(SEQUENCES["deep lstm"])
    prepared = tc.prepare_fx(model, QConfigMapping().set_global(default_dynamic_qconfig), (example(model),))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        converted = tc.convert_fx(prepared)  # nothing to calibrate, so no warning
    stored = [value for value in converted.state_dict().values() if value.dtype is torch.int8]
    assert sum(value.numel() for value in stored) == sum(p.numel() for p in model.parameters() if p.dim() > 1)


@pytest.mark.slow
def test_nodes_do_not_depend_on_the_length() -> None:
    model = build(SEQUENCES["deep gru"])
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
    model = build(SEQUENCES["lstm"])
    mapping = QConfigMapping().set_global(default_dynamic_qconfig)
    theirs, ours = (run(model, mapping, example(model)) for run in (by_fx, by_us))
    packed = pack_padded_sequence(example(model, steps=6, batch=3), torch.tensor([6, 4, 1]))
    with torch.no_grad():
        expected, found = (pad_packed_sequence(m.rnn(packed)[0])[0] for m in (theirs, ours))
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
