"""convert_fx for engines other than x86's: their qparams, on the same kernels, on any machine."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx as fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import QConfigMapping, default_dynamic_qconfig, get_default_qconfig_mapping

import torchq_compat as tc
from tests.helpers.once import made_once
from tests.helpers.oracle import calibrate, leaves, sqnr
from torchq_compat.errors import QuantizationWarning
from torchq_compat.lower.integers.lowered_module import LoweredGraphModule
from torchq_compat.model.graph_module import ConvertedModel
from torchq_compat.support.decisions import Action
from torchq_compat.support.quantized_tensors import is_quantized

N = "torchq_compat_native"
OWN = f"runs as {N}.recurrent.default, one linear"
NATIVE = torch.ops.torchq_compat_native.recurrent.default


class Mobile(nn.Module):
    """The model of a mobile tutorial: convolutions, also depthwise, a sum, pools, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.pointwise = nn.Conv2d(16, 16, 1)
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.pointwise(F.relu(self.depthwise(x)))
        x = F.max_pool2d(torch.cat([x, x], 1)[:, :16], 2)
        head: Tensor = self.head(F.adaptive_avg_pool2d(self.up(x), 1).flatten(1))
        return head


class Speech(nn.Module):
    """Only recurrent modules and linears, in two and three dimensions, one behind another's halves."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(12, 16, bidirectional=True)
        self.first, self.second = nn.Linear(32, 24), nn.Linear(24, 7)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = F.relu(self.first(self.rnn(x)[0]))
        return F.gelu(self.second(hidden)), self.second(hidden[-1])


def prepared(model: nn.Module, mapping: QConfigMapping, *shape: int) -> Any:
    batches = [(torch.randn(shape),) for _ in range(4)]
    made = tc.prepare_fx(model, mapping, batches[0], tc.get_default_prepare_custom_config())
    calibrate(made, batches)
    return made


def converted(model: nn.Module, mapping: QConfigMapping, *shape: int) -> ConvertedModel:
    return tc.convert_fx(prepared(model, mapping, *shape))


@made_once
def prepared_speech() -> Any:
    """Return a calibrated model, whatever engine it is converted for."""
    torch.manual_seed(0)
    return prepared(Speech().eval(), get_default_qconfig_mapping("qnnpack"), 6, 3, 12)


def actions(model: Any) -> dict[str, Action]:
    return {
        d.node or d.path: d.action for d in model.lowering if d.action in (Action.LOWERED, Action.REFERENCE)
    }


def reasons(model: Any) -> dict[str, str]:
    return {d.path: d.reason for d in model.lowering}


@torch.no_grad()
def test_qnnpack_runs_on_integers_what_fx_does(engine: Callable[[str], None]) -> None:
    engine("qnnpack")
    torch.manual_seed(0)
    model, mapping = Mobile().eval(), get_default_qconfig_mapping("qnnpack")
    batches = [(torch.randn(2, 3, 16, 16),) for _ in range(4)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", QuantizationWarning)
        prepared = tc.prepare_fx(model, mapping, batches[0])
        calibrate(prepared, batches)
        lowered = tc.convert_fx(prepared)
    assert isinstance(lowered, LoweredGraphModule)
    assert set(actions(lowered).values()) == {Action.LOWERED}, lowered.lowering
    names = {str(node.target) for node in lowered.graph.nodes if node.op == "call_function"}
    kernels = ("convolution", "arithmetic", "lookup", "max_pool", "mean", "linear", "quantize", "dequantize")
    assert {name for name in names if name.startswith(N)} == {f"{N}.{each}.default" for each in kernels}
    assert sum(str(node.target) == f"{N}.dequantize.default" for node in lowered.graph.nodes) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = fx.prepare_fx(copy.deepcopy(model), mapping, batches[0])
        calibrate(theirs, batches)
        theirs = fx.convert_fx(theirs)
    for size in (2, 5):
        x = torch.randn(size, 3, 16, 16)
        found = lowered(x)
        # A value rounded the other way moves an integer by one, and each of these moves the next layer a
        # little.
        assert sqnr(lowered.reference(x), found) > 30
        assert sqnr(theirs(x), found) > 28
        assert 20 < sqnr(model(x), found) < 50


@torch.no_grad()
def test_a_model_is_the_same_for_every_engine_and_machine(
    monkeypatch: pytest.MonkeyPatch, engine: Callable[[str], None]
) -> None:
    """The graph has no quantized tensors."""
    models = []
    for name, machine in (("qnnpack", "x86_64"), ("x86", "x86_64"), ("x86", "aarch64"), ("x86", "riscv64")):
        engine(name)
        monkeypatch.setattr("platform.machine", lambda machine=machine: machine)
        models.append(tc.convert_fx(prepared_speech()))
    found = models[0]
    torch.manual_seed(1)
    x = torch.randn(9, 2, 12)
    assert all(
        torch.equal(one, other) for each in models for one, other in zip(each(x), found(x), strict=True)
    )
    for reference, value in zip(found.reference(x), found(x), strict=True):
        assert sqnr(reference, value) > 38
    assert reasons(found)["first/linear"] == OWN  # Each direction has qparams of its own.
    assert reasons(found)["second/linear_1"] == f"runs as {N}.linear.default"
    assert actions(found)["rnn/lowering"] is Action.LOWERED
    seen: list[bool] = []

    class Watcher(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            result = super().run_node(n)
            seen.extend(is_quantized(each) for each in leaves(result))
            return result

    Watcher(found, graph=found.graph).run(x)
    assert seen
    assert not any(seen)
    kept = {key: value.clone() for key, value in found.state_dict().items()}
    again = copy.deepcopy(found)
    again.load_state_dict(kept)
    assert all(map(torch.equal, found(x), again(x)))
    found.get_parameter("first.bias").add_(1.0)
    assert not torch.equal(found(x)[1], again(x)[1])
    assert sqnr(found.reference(x)[1], found(x)[1]) > 38


@torch.no_grad()
def test_dynamic_linears() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    lowered = converted(model, QConfigMapping().set_global(default_dynamic_qconfig), 3, 5, 8)
    assert isinstance(lowered, LoweredGraphModule)
    assert list(reasons(lowered).values()).count(OWN) == 2
    for shape in ((3, 5, 8), (1, 1, 8), (40, 2, 8)):
        x = torch.randn(shape)
        assert sqnr(lowered.reference(x), lowered(x)) > 55
        assert 30 < sqnr(model(x), lowered(x)) < 55


@pytest.mark.parametrize("mapping", ["static", "dynamic"])
@torch.no_grad()
def test_torchscript_has_the_same_kernels(mapping: str, engine: Callable[[str], None]) -> None:
    """The next step of a mobile tutorial; the process that loads the file loads the library of kernels."""
    engine("qnnpack")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    dynamic = QConfigMapping().set_global(default_dynamic_qconfig)
    lowered = converted(
        model, dynamic if mapping == "dynamic" else get_default_qconfig_mapping("qnnpack"), 3, 8
    )
    x = torch.randn(5, 8)
    kernel = "recurrent" if mapping == "dynamic" else "linear"
    for script in (torch.jit.script(lowered), torch.jit.trace(lowered, x)):
        text = str(script.inlined_graph)
        assert text.count(f"{N}::{kernel}(") == 2
        assert "quantized::" not in text
        for _ in range(3):
            assert torch.equal(lowered(x), script(x))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rank", [1, 2, 4])
@torch.no_grad()
def test_ranks_and_biases(rank: int, bias: bool, engine: Callable[[str], None]) -> None:
    engine("qnnpack")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 19, bias=bias), nn.ReLU(), nn.Linear(19, 3, bias=bias)).eval()
    shape = (2, 3, 4, 70)[4 - rank :]
    lowered = converted(model, get_default_qconfig_mapping("qnnpack"), *shape)
    assert isinstance(lowered, LoweredGraphModule)
    linear = f"runs as {N}.linear.default"
    assert [reason.startswith(linear) for reason in reasons(lowered).values()].count(True) == 2
    x = torch.randn(shape)
    found, expected = lowered(x), lowered.reference(x)
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= 1e-6
    assert found.unique().numel() > 2
