"""The result of convert_fx on x86 through a model's life: states, copies, modes, captures, engines."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.ao.quantization.fx.custom_config import PrepareCustomConfig
from torch.fx import GraphModule

import torchq_compat as tc
from tests.helpers.once import made_once
from tests.helpers.oracle import CONVERT_LSTM, MAP_LSTM, calibrate, sqnr
from torchq_compat.custom_modules.registry import handler_of
from torchq_compat.errors import ConfigError, QuantizationWarning
from torchq_compat.lower.x86.engines import decide_engine
from torchq_compat.lower.x86.lowered_module import LoweredGraphModule
from torchq_compat.opaque_calls.opaque_module import OpaqueModule

MAPPING = get_default_qconfig_mapping("x86")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.drop, self.fc = nn.Conv2d(3, 8, 3), nn.Dropout(0.5), nn.Linear(8, 4)
        self.tag = "kept"

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.fc(self.drop(torch.relu(self.conv(x)).mean((2, 3))) * scale)


def images(count: int = 4) -> Tensor:
    return torch.randn(count, 3, 9, 9)


def prepare(seed: int, config: Any = None) -> Any:
    torch.manual_seed(seed)
    prepared = tc.prepare_fx(Net().eval(), MAPPING, (images(),), config)
    calibrate(prepared, [(images(),)])
    return prepared


prepared_once = made_once(prepare)


@made_once
def convert(seed: int) -> Any:
    return tc.convert_fx(prepared_once(seed))


@pytest.fixture
def trained() -> Any:
    return convert(0)


@pytest.fixture
def other() -> Any:
    return convert(1)


def test_a_graph_of_integer_kernels_around_the_reference(trained: Any) -> None:
    assert isinstance(trained, LoweredGraphModule)
    assert isinstance(trained, GraphModule)
    assert "quantized.conv2d.new" in trained.code
    assert "quantized_decomposed" not in trained.code
    assert "quantized_decomposed" in trained.reference.code
    assert torch.equal(torch.fx.Interpreter(trained).run(images()) * 0, torch.zeros(4, 4))


def test_the_state_is_that_of_the_reference(trained: Any, tmp_path: Path) -> None:
    state = trained.state_dict()
    assert list(state) == list(trained.reference.state_dict())
    torch.save(state, tmp_path / "state.pt")
    loaded = convert(1)
    x = images()
    assert not torch.equal(loaded(x), trained(x))
    loaded.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert torch.equal(loaded(x), trained(x))
    assert torch.equal(loaded.reference(x), trained.reference(x))


def test_a_model_that_holds_it_loads_it_too(trained: Any, other: Any) -> None:
    x = images()
    holder = nn.Sequential(other)
    holder.load_state_dict(nn.Sequential(trained).state_dict())
    assert torch.equal(holder(x), trained(x))


def test_a_state_that_does_not_fit_changes_nothing(trained: Any, other: Any) -> None:
    x = images()
    before = other(x)
    state = dict(trained.state_dict())
    del state["fc.bias"]
    with pytest.raises(tc.TorchQCompatError, match=r"fc\.bias"):
        other.load_state_dict(state)
    assert torch.equal(other(x), before)


def test_a_copy_shares_nothing(trained: Any, other: Any) -> None:
    x = images()
    copied = copy.deepcopy(other)
    assert isinstance(copied, LoweredGraphModule)
    assert torch.equal(copied(x), other(x))
    copied.load_state_dict(trained.state_dict())
    assert not torch.equal(copied(x), other(x))


def test_the_modes_of_the_reference(other: Any) -> None:
    x = images(64)
    assert not other.training
    assert torch.equal(other(x), other(x))
    assert other.train() is other
    assert other.reference.training
    assert not torch.equal(other(x), other(x))
    other.eval()
    assert torch.equal(other(x), other(x))


def test_calls_and_attributes_of_the_float_model() -> None:
    converted = tc.convert_fx(prepare(0, PrepareCustomConfig().set_preserved_attributes(["tag"])))
    x = images()
    assert converted.tag == copy.deepcopy(converted).tag == "kept"
    assert torch.equal(converted(x=x), converted(x))
    with pytest.raises(tc.TorchQCompatError, match="unexpected or repeated argument 'y'"):
        converted(y=x)


@pytest.mark.parametrize("strict", [True, False])
def test_torch_export_gets_the_portable_graph(trained: Any, strict: bool) -> None:
    x = images()
    dynamic = ({0: torch.export.Dim.AUTO}, None)[:1]
    program = torch.export.export(trained, (x,), dynamic_shapes=dynamic, strict=strict)
    targets = {str(node.target).split(".")[0] for node in program.graph.nodes if node.op == "call_function"}
    assert "quantized_decomposed" in targets
    assert "quantized" not in targets
    assert torch.equal(program.module()(x), trained.reference(x))


def test_torch_compile_without_a_graph_break(trained: Any) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(trained, fullgraph=True, backend="aot_eager")
    for count in (4, 2):
        x = images(count)
        torch.testing.assert_close(compiled(x), trained.reference(x), rtol=0, atol=1e-6)


def test_torch_jit_trace(trained: Any) -> None:
    traced, x = torch.jit.trace(trained, (images(),)), images(2)
    assert torch.equal(traced(x), trained(x))


def test_another_device_is_the_reference(other: Any) -> None:
    other.to("meta")
    (decision,) = [d for d in tc.explain(other) if d.action == "reference"]
    assert "its state is on meta" in decision.reason
    assert other(images().to("meta")).shape == (4, 4)


class Tagger(nn.Module):
    def __init__(self, *, both_ways: bool) -> None:
        super().__init__()
        self.inp, self.lstm = nn.Linear(5, 8), nn.LSTM(8, 6, bidirectional=both_ways)
        self.out = nn.Sequential(nn.Linear(12 if both_ways else 6, 3), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(self.inp(x))[0])


@made_once
def tagger(*, both_ways: bool) -> tuple[nn.Module, Any]:
    """Return a float model, and it prepared and calibrated."""
    torch.manual_seed(0)
    model = Tagger(both_ways=both_ways).eval()
    prepared = tc.prepare_fx(model, MAPPING, (torch.randn(7, 3, 5),), MAP_LSTM)
    calibrate(prepared, [(torch.randn(7, 3, 5),) for _ in range(4)])
    return model, prepared


#: The two directions have two sets of qparams.
HEADS = {
    False: "quantized.linear_relu.default",
    True: "2 x quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default",
}


@pytest.mark.parametrize("both_ways", HEADS)
def test_integers_cross_the_boundary_of_an_opaque_call(both_ways: bool) -> None:
    model, prepared = tagger(both_ways=both_ways)
    lowered = tc.convert_fx(prepared, CONVERT_LSTM)
    for length, batch in ((7, 3), (1, 1), (20, 2)):
        x = torch.randn(length, batch, 5)
        expected, found = lowered.reference(x), lowered(x)
        assert sqnr(expected, found) > 30
    assert 20 < sqnr(model(x), found) < 50
    (decision,) = tc.explain(lowered).find("out.0/linear_1")
    assert decision.reason == f"runs as {HEADS[both_ways]}"


def test_a_kind_lowers_its_own_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler's module is called in place of the opaque module, which keeps path and state."""
    _, prepared = tagger(both_ways=False)
    reference = tc.convert_to_reference_fx(prepared, CONVERT_LSTM)
    handler, made = handler_of(reference.lstm), []

    def lower(_: Any, opaque: OpaqueModule) -> OpaqueModule:
        made.append(copy.deepcopy(opaque))
        return made[-1]

    monkeypatch.setattr(type(handler), "lower", lower)
    lowered = tc.convert_fx(prepared, CONVERT_LSTM)
    (call,) = lowered.graph.find_nodes(op="call_module", target="lowered.lstm")
    assert lowered.lowered.lstm is made[0]
    assert lowered.lstm is lowered.reference.lstm
    assert [d.action for d in tc.explain(lowered).find("lstm/lowering")] == ["lowered"]
    assert {argument.target for argument in call.args} == {torch.ops.aten.int_repr.default}
    x = torch.randn(4, 2, 5)
    assert sqnr(lowered.reference(x), lowered(x)) > 40
    lowered.load_state_dict(reference.state_dict())
    assert lowered.lowered.lstm is made[1]


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.fc = nn.MultiheadAttention(8, 2), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.attention(x, x, x)[0])


def test_projections_of_attention_are_lowered() -> None:
    torch.manual_seed(0)
    config = PrepareCustomConfig().set_float_to_observed_mapping(
        nn.MultiheadAttention, torch.ao.nn.quantizable.MultiheadAttention
    )
    model = Attends().eval()
    prepared = tc.prepare_fx(model, MAPPING, (torch.randn(7, 3, 8),), config)
    calibrate(prepared, [(torch.randn(7, 3, 8),) for _ in range(4)])
    lowered = tc.convert_fx(prepared)
    about = tc.explain(lowered).find("attention")
    kernels = {d.path: d.reason for d in about if d.action == "lowered"}
    projections = [f"attention.project_in/linear_{name}" for name in "QKV"]
    assert kernels == dict.fromkeys(
        [*projections, "attention.project_out/out_proj"], "runs as quantized.linear.default"
    )
    x = torch.randn(5, 2, 8)
    assert sqnr(lowered.reference(x), lowered(x)) > 40
    assert 20 < sqnr(model(x), lowered(x)) < 50
    assert list(lowered.state_dict()) == list(lowered.reference.state_dict())


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front, self.block = nn.Linear(5, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.front(x))


@pytest.mark.parametrize("indexes", [[], [0]])
def test_standalone_modules_are_lowered(indexes: list[int]) -> None:
    torch.manual_seed(0)
    inner = PrepareCustomConfig().set_input_quantized_indexes(indexes).set_output_quantized_indexes(indexes)
    config = PrepareCustomConfig().set_standalone_module_name(
        "block", None, (torch.randn(3, 8),), inner, None
    )
    prepared = tc.prepare_fx(Around().eval(), MAPPING, (torch.randn(3, 5),), config)
    calibrate(prepared, [(torch.randn(3, 5),) for _ in range(4)])
    lowered = tc.convert_fx(prepared)
    assert "quantized.linear_relu.default" in lowered.lowered.block.model.code
    assert [d.action for d in tc.explain(lowered).find("block.0/linear")] == ["lowered"]
    x = torch.randn(6, 5)
    assert torch.equal(lowered(x), lowered.reference(x))


def test_quantized_inputs_and_outputs() -> None:
    torch.manual_seed(0)
    config = PrepareCustomConfig().set_input_quantized_indexes([0]).set_output_quantized_indexes([0])
    lowered = tc.convert_fx(prepare(0, config))
    (qparams_in,), (qparams_out,) = lowered.input_qparams(), lowered.output_qparams()
    integers = qparams_in.quantize(images())
    found = lowered(integers)
    assert found.dtype is torch.uint8
    assert torch.equal(found, lowered.reference(integers))
    legacy = torch.quantize_per_tensor(
        qparams_in.dequantize(integers), qparams_in.scale, qparams_in.zero_point, torch.quint8
    )
    assert torch.equal(lowered(legacy), found)
    assert qparams_out.dequantize(found).std() > 0


@pytest.mark.parametrize(
    ("engine", "machine", "reason"),
    [
        ("x86", "x86_64", ""),
        ("fbgemm", "AMD64", ""),
        ("onednn", "x86_64", ""),
        ("qnnpack", "x86_64", ""),
        ("qnnpack", "arm64", ""),
        ("none", "x86_64", "the quantized engine is 'none'"),
        ("onednn", "aarch64", "the machine is aarch64"),
    ],
)
def test_which_engines_and_machines_have_kernels(engine: str, machine: str, reason: str) -> None:
    found = decide_engine(engine, machine)
    assert found.has_kernels is (reason == "")
    assert found.why_not.startswith(reason)


def test_an_engine_torch_does_not_have() -> None:
    with pytest.raises(ConfigError, match="'cuda', an engine convert_fx does not know") as caught:
        decide_engine("cuda", "x86_64")
    assert "convert_to_reference_fx" in caught.value.hint


def test_elsewhere_the_reference_graph_and_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("platform.machine", lambda: "aarch64")
        with pytest.warns(QuantizationWarning, match="the machine is aarch64"):
            converted = tc.convert_fx(prepared_once(0))
    assert not any("quantized." in str(node.target) for node in converted.graph.nodes)
    (decision,) = [d for d in tc.explain(converted) if d.kind == "convert_fx"]
    assert (decision.action, decision.warn) == ("reference", True)
    x = images()
    assert torch.equal(converted(x), convert(0).reference(x))
