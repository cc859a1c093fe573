"""The result of convert_fx through a model's life: states, copies, modes, captures, engines."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
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
from torchq_compat.capture.opaque_calls import OpaqueModule
from torchq_compat.errors import CallError, ConfigError
from torchq_compat.lower.integers.lowered_module import LoweredGraphModule
from torchq_compat.modules.registry import handler_of

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
    assert "torchq_compat_native.convolution" in trained.code
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
def test_torch_export_gets_the_graph_that_runs(trained: Any, strict: bool, tmp_path: Path) -> None:
    x = images()
    dynamic = ({0: torch.export.Dim.AUTO}, None)[:1]
    program = torch.export.export(trained, (x,), dynamic_shapes=dynamic, strict=strict)
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    ours = [str(node.target) for node in trained.graph.nodes if node.op == "call_function"]
    assert [each for each in targets if "native" in each] == [each for each in ours if "native" in each]
    assert not any("quantized" in target for target in targets)
    torch.export.save(program, tmp_path / "program.pt2")
    for again in (program, torch.export.load(tmp_path / "program.pt2")):
        for count in (4, 2, 7):
            x = images(count)
            assert torch.equal(again.module()(x), trained(x))


def test_torch_compile_without_a_graph_break(trained: Any) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(trained, fullgraph=True, backend="aot_eager")
    for count in (4, 2):
        x = images(count)
        assert torch.equal(compiled(x), trained(x))


def test_torch_jit_trace(trained: Any) -> None:
    traced, x = torch.jit.trace(trained, (images(),)), images(2)
    assert torch.equal(traced(x), trained(x))


class ThereAndBack(nn.Module):
    """A weight that one kernel reads as it is, and of which a constant is made for another."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.drawn = nn.Parameter(torch.randn(4, 3, 3, 3)), nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv_transpose2d(nn.functional.conv2d(self.drawn(x), self.weight), self.weight)


def test_each_tensor_of_the_state_may_be_written() -> None:
    torch.manual_seed(0)
    prepared = tc.prepare_fx(ThereAndBack().eval(), MAPPING, (images(),))
    calibrate(prepared, [(images(),)])
    converted, x = tc.convert_fx(prepared), images()
    kernels = [str(node.target) for node in converted.graph.nodes if "convolution" in str(node.target)]
    assert len(kernels) == 3
    state = converted.state_dict()
    names = [name for name, value in state.items() if isinstance(value, Tensor) and name != "_extra_state"]
    assert len(names) == 8
    for name in names:
        value, before = state[name], converted(x)
        with torch.no_grad():
            value.copy_(value.flip(0) if value.unique().numel() > 1 else value + 1)
        after = converted(x)
        assert sqnr(converted.reference(x), after) > 40, name
        assert not torch.equal(before, after), name


def test_all_that_stands_around_a_call_is_called(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, calls = images(), list[str]()
    expected = trained(x)
    handles = (
        trained.register_forward_pre_hook(lambda *_: calls.append("before")),
        trained.register_forward_hook(lambda *_: calls.append("behind")),
        nn.modules.module.register_module_forward_hook(
            lambda module, *_: calls.append(type(module).__name__)
        ),
    )
    for index, handle in enumerate(handles):
        calls.clear()
        assert torch.equal(trained(x), expected)
        assert len(set(calls)) >= 3 - index
        handle.remove()
    calls.clear()
    assert torch.equal(trained(x), expected)
    assert not calls
    forward = trained.forward
    monkeypatch.setattr(trained, "forward", lambda *args: forward(*args) + 1.0)
    assert torch.equal(trained(x), expected + 1.0)


def test_a_call_that_was_accepted_and_fails_is_explained(trained: Any) -> None:
    x = images()
    trained(x)
    with pytest.raises(CallError, match=r"(?s)failed at quantize.*it was prepared for.*TQ904"):
        trained(x.to_sparse())


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
    False: "torchq_compat_native.linear.default",
    True: "torchq_compat_native.recurrent.default, one linear",
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
    """The handler's module is called in place of the opaque module of the reference, at its path."""
    _, prepared = tagger(both_ways=False)
    reference = tc.convert_to_reference_fx(prepared, CONVERT_LSTM)
    handler, made = handler_of(reference.lstm), []

    def lower(_: Any, opaque: OpaqueModule) -> OpaqueModule:
        made.append(copy.deepcopy(opaque))
        return made[-1]

    monkeypatch.setattr(type(handler), "lower", lower)
    lowered = tc.convert_fx(prepared, CONVERT_LSTM)
    (call,) = lowered.graph.find_nodes(op="call_module", target="lstm")
    assert lowered.lstm is made[0]
    assert lowered.reference.lstm is not made[0]
    assert [d.action for d in tc.explain(lowered).find("lstm/lowering")] == ["lowered"]
    assert {argument.target for argument in call.args} == {torch.ops.torchq_compat_native.linear.default}
    x = torch.randn(4, 2, 5)
    assert sqnr(lowered.reference(x), lowered(x)) > 40
    lowered.load_state_dict(reference.state_dict())
    assert lowered.lstm is made[1]


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
        [*projections, "attention.project_out/out_proj"], "runs as torchq_compat_native.linear.default"
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
    assert "torchq_compat_native.linear.default" in lowered.block.code
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


def test_every_engine_runs_on_the_same_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for name in ("x86", "fbgemm", "onednn", "qnnpack"):
        monkeypatch.setattr("torch.backends.quantized.engine", name)
        found.append(tc.convert_fx(prepared_once(0)))
    x = images()
    assert all(torch.equal(each(x), found[0](x)) for each in found)
    assert {each.code for each in found} == {found[0].code}


def test_an_engine_torch_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.backends.quantized", SimpleNamespace(engine="cuda"))
    with pytest.raises(ConfigError, match="'cuda', an engine convert_fx does not know") as caught:
        tc.convert_fx(prepared_once(0))
    assert "convert_to_reference_fx" in caught.value.hint
