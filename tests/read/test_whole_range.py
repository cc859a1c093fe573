"""Dynamic activations over the whole range of eight bits: one setting, the same numbers on every engine."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import (
    QConfigMapping,
    default_dynamic_qconfig,
    default_qconfig,
    float16_dynamic_qconfig,
    per_channel_dynamic_qconfig,
)

import torchq_compat as tc
from tests.helpers.once import made_once
from tests.helpers.oracle import sqnr
from torchq_compat.errors import ConfigError
from torchq_compat.lower.integers.lowered_module import LoweredGraphModule
from torchq_compat.profiles import whole_range_dynamic
from torchq_compat.read.qdq import CHOOSE_QPARAMS

ENGINES = ("x86", "onednn", "fbgemm", "qnnpack")


class Tagger(nn.Module):
    """A recurrent module and a linear."""

    def __init__(self, rnn: nn.Module) -> None:
        super().__init__()
        self.rnn = rnn
        self.head = nn.Linear(48, 8)

    def forward(self, x: Tensor) -> Tensor:
        head: Tensor = self.head(self.rnn(x)[0])
        return head


MODELS: dict[str, Callable[[], Tagger]] = {
    "lstm": lambda: Tagger(nn.LSTM(16, 24, bidirectional=True)),
    "gru": lambda: Tagger(nn.GRU(16, 48, batch_first=True)),
}


def built(name: str) -> tuple[Tagger, Tensor]:
    torch.manual_seed(0)
    return MODELS[name]().eval(), torch.randn(9, 4, 16)


@made_once
def _converted(name: str, whole: bool, engine: str) -> Any:
    assert torch.backends.quantized.engine == engine
    model, x = built(name)
    qconfig = whole_range_dynamic() if whole else default_dynamic_qconfig
    return tc.convert_fx(tc.prepare_fx(model, QConfigMapping().set_global(qconfig), (x,)))


def converted(name: str, *, whole: bool) -> Any:
    return _converted(name, whole, torch.backends.quantized.engine)


def chosen_ranges(graph: Any) -> set[tuple[int, int]]:
    modules = [each for each in graph.modules() if isinstance(each, torch.fx.GraphModule)]
    return {node.args[1:3] for each in modules for node in each.graph.nodes if node.target is CHOOSE_QPARAMS}


@pytest.mark.parametrize("name", [pytest.param("lstm", marks=pytest.mark.slow), "gru"])
def test_a_bit_more_on_x86_and_equal_numbers_on_every_engine(
    name: str, engine: Callable[[str], None]
) -> None:
    model, x = built(name)
    results = {}
    with torch.no_grad():
        exact = model(x)
        for each in ENGINES:
            engine(each)
            found = converted(name, whole=True)
            assert isinstance(found, LoweredGraphModule)
            assert chosen_ranges(found.reference) == {(0, 255)}
            # The integers are the same; float sums are in another order.
            assert sqnr(found.reference(x), found(x)) > 55
            results[each] = found(x)
        engine("x86")
        reduced = converted(name, whole=False)
        assert chosen_ranges(reduced.reference) == {(0, 127)}
        gain = sqnr(exact, results["x86"]) - sqnr(exact, reduced(x))
    assert 3 < gain < 9
    for each in ENGINES:
        torch.testing.assert_close(results[each], results["x86"], rtol=0, atol=2e-6)


def test_explain_state_and_export_know_the_range(engine: Callable[[str], None]) -> None:
    engine("x86")
    x = built("gru")[1]
    whole, reduced = (converted("gru", whole=each) for each in (True, False))
    (shown,) = [d.values for d in tc.explain(whole).find("head") if d.values]
    assert [value.spread for value in shown if value.dynamic] == [(0, 255)]
    assert "over 0 to 255" in str(tc.explain(whole))
    assert "over 0 to 127" in str(tc.explain(reduced))
    with torch.no_grad():
        before, wanted = reduced(x), whole(x)
        assert not torch.allclose(before, wanted, atol=1e-4)
        reduced.load_state_dict(whole.state_dict())
        torch.testing.assert_close(reduced(x), wanted, rtol=0, atol=2e-6)
        program = tc.export(whole, (x,))
        assert sqnr(wanted, program.module()(x)) > 55
    ranges = {tuple(node.args[1:3]) for node in program.graph.nodes if node.target is CHOOSE_QPARAMS}
    assert ranges == {(0, 255)}


@pytest.mark.parametrize(
    "qconfig", [default_dynamic_qconfig, pytest.param(per_channel_dynamic_qconfig, marks=pytest.mark.slow)]
)
def test_quantize_dynamic(qconfig: Any, engine: Callable[[str], None]) -> None:
    engine("x86")
    model, x = built("gru")
    spec = {nn.GRU: qconfig, nn.Linear: qconfig}
    reduced = tc.quantize_dynamic(model, spec)
    whole = tc.quantize_dynamic(model, spec, whole_range=True)
    by_qconfig = tc.quantize_dynamic(model, dict.fromkeys(spec, whole_range_dynamic(qconfig)))
    with torch.no_grad():
        exact, found = model(x), whole(x)
        assert 3 < sqnr(exact, found) - sqnr(exact, reduced(x)) < 9
        assert torch.equal(found, by_qconfig(x))
        linear = 40 * x.repeat(1, 1, 3)  # (9, 4, 48)
        errors = [sqnr(model.head(linear), each.head(linear)) for each in (reduced, whole)]
        assert 3 < errors[1] - errors[0] < 9
        assert errors[1] < 55
        for again in (copy.deepcopy(whole), pickled(whole)):
            assert torch.equal(again(x), found)
        fresh = tc.quantize_dynamic(MODELS["gru"]().eval(), spec, whole_range=True)
        assert not torch.allclose(fresh(x), found, atol=1e-3)
        fresh.load_state_dict(whole.state_dict())
        assert torch.equal(fresh(x), found)
        assert whole.head(torch.zeros(0, 48)).shape == (0, 8)
    assert whole.head.weight().dtype is torch.qint8


def pickled(model: nn.Module) -> Any:
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    return torch.load(stored, weights_only=False)


def test_what_has_no_dynamic_integers() -> None:
    for qconfig in (default_qconfig, float16_dynamic_qconfig):
        with pytest.raises(ConfigError, match="not quantized dynamically to 8 bits"):
            whole_range_dynamic(qconfig)


@pytest.mark.slow
def test_float16_has_no_range_to_widen() -> None:
    model, x = built("lstm")
    with torch.no_grad():
        plain, asked = (
            tc.quantize_dynamic(model, {nn.LSTM}, dtype=torch.float16, whole_range=each)(x)
            for each in (False, True)
        )
        assert torch.equal(plain, asked)
        assert 50 < sqnr(model(x), asked) < 90


def test_a_whole_range_model_is_exported_traced_and_scripted() -> None:
    layers = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2, bias=False)).eval()
    spec = {"0": default_dynamic_qconfig, "1": per_channel_dynamic_qconfig}
    model = tc.quantize_dynamic(layers, spec, whole_range=True)
    program = torch.export.export(
        model, (torch.randn(2, 3, 4),), dynamic_shapes=({0: torch.export.Dim.AUTO},)
    )
    assert CHOOSE_QPARAMS in {node.target for node in program.graph.nodes}
    forms = {
        "exported": program.module(),
        "traced": torch.jit.trace(model, torch.randn(2, 4)),  # type: ignore[no-untyped-call]
        "scripted": torch.jit.script(model),
    }
    x = torch.randn(5, 3, 4)
    with torch.no_grad():
        for name, form in forms.items():
            assert (form(x) - model(x)).abs().max() < 1e-6, name
