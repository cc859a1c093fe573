"""Standalone modules and non-traceable modules, beside FX."""

from __future__ import annotations

import copy
import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx as fx
from torch import Tensor, nn
from torch.ao.quantization import QConfigMapping, get_default_qat_qconfig_mapping, get_default_qconfig_mapping
from torch.ao.quantization.fx.custom_config import PrepareCustomConfig
from torch.fx import GraphModule

import torchq_compat as tc
from tests.helpers.once import made_once
from tests.helpers.oracle import MAP_LSTM, calibrate, leaves, sqnr
from torchq_compat.errors import QuantizationWarning

MAPPING = get_default_qconfig_mapping("qnnpack")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.conv(x))


class Net(nn.Module):
    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 3, 1)
        self.block = block()
        self.last = nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(self.first(x)))


def images() -> list[tuple[Tensor]]:
    torch.manual_seed(0)
    return [(torch.randn(2, 3, 5, 5),) for _ in range(5)]


def inner(inputs: list[int], outputs: list[int]) -> PrepareCustomConfig:
    return PrepareCustomConfig().set_input_quantized_indexes(inputs).set_output_quantized_indexes(outputs)


def by_name(mapping: Any, inside: Any) -> PrepareCustomConfig:
    return PrepareCustomConfig().set_standalone_module_name("block", mapping, images()[0], inside, None)


def reference_of_fx(model: nn.Module, config: Any) -> GraphModule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = fx.prepare_fx(copy.deepcopy(model), MAPPING, images()[0], config)
        calibrate(prepared, images())
        return fx.convert_to_reference_fx(prepared)


def ours(model: nn.Module, config: Any) -> GraphModule:
    prepared = tc.prepare_fx(model, MAPPING, images()[0], config)
    calibrate(prepared, images())
    return tc.convert_fx(prepared)


def build() -> Net:
    torch.manual_seed(1)
    return Net().eval()


INTERFACES = (([], []), ([0], []), ([], [0]), ([0], [0]))
#: The parent's qconfig or an own mapping, for each interface.
CASES = list(itertools.product((None, MAPPING), INTERFACES))
BLOCKS = [type(f"Block{index}", (Block,), {}) for index in range(len(CASES))]
globals().update((block.__name__, block) for block in BLOCKS)  # for pickle


class Nets(nn.Module):
    """The same ``Net`` for each case, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(map(Net, BLOCKS))
        for net in self.nets:
            net.load_state_dict(build().state_dict())

    def forward(self, x: Tensor) -> list[Tensor]:
        return [net(x) for net in self.nets]


def configured(*, as_dict: bool) -> Any:
    """Return a config of every second case by name and of the others by class; as a dict the other way
    round."""
    config, by = PrepareCustomConfig(), {"standalone_module_name": [], "standalone_module_class": []}
    for index, (block, (own, interface)) in enumerate(zip(BLOCKS, CASES, strict=True)):
        row = own, images()[0], inner(*interface), None
        if index % 2 == as_dict:
            by["standalone_module_name"].append((f"nets.{index}.block", *row))
        else:
            by["standalone_module_class"].append((block, *row))
    if as_dict:
        return by
    for name_row in by["standalone_module_name"]:
        config.set_standalone_module_name(*name_row)
    for class_row in by["standalone_module_class"]:
        config.set_standalone_module_class(*class_row)
    return config


@pytest.mark.parametrize("as_dict", [False, True])
def test_bit_equal_to_fx(as_dict: bool) -> None:
    model, config = Nets().eval(), configured(as_dict=as_dict)
    expected, found = reference_of_fx(model, config), ours(model, config)
    x = torch.randn(3, 3, 6, 6)
    with torch.no_grad():
        for case, a, b, c in zip(CASES, model(x), expected(x), found(x), strict=True):
            assert torch.equal(c, b), case
            assert 25 < sqnr(a, c) < 60, case
    for index, case in enumerate(CASES):
        assert isinstance(found.get_submodule(f"nets.{index}.block"), GraphModule), case


@made_once
def with_integers_on_both_sides() -> tuple[GraphModule, GraphModule]:
    """Return (prepared, converted); the prepared model has seen no data."""
    prepared = tc.prepare_fx(build(), MAPPING, images()[0], by_name(None, inner([0], [0])))
    calibrated = copy.deepcopy(prepared)
    calibrate(calibrated, images())
    return prepared, tc.convert_fx(calibrated)


def test_a_model_of_its_own_at_its_own_path() -> None:
    _, converted = with_integers_on_both_sides.itself()
    assert isinstance(converted.block, GraphModule)
    placeholder = converted.block.graph.find_nodes(op="placeholder")[0]
    assert placeholder.meta["val"].dtype is torch.uint8
    assert "block.conv.bias" in converted.state_dict()
    decisions = tc.explain(converted.reference).find("block")
    assert [d.path for d in decisions if "input" not in d.path] == ["block", "block.conv"]
    assert decisions[1].details["dtype"] is torch.uint8


def test_switched_off_inside_only() -> None:
    model = build()
    converted = ours(model, by_name(QConfigMapping(), None))
    decision = tc.explain(converted).find("block.conv")[0]
    assert decision.action.value == "float"
    assert tc.explain(converted).find("first")[0].action.value == "quantized"


def test_deepcopy_and_state_dict() -> None:
    (prepared, converted), x = with_integers_on_both_sides(), torch.randn(1, 3, 4, 4)
    assert torch.equal(copy.deepcopy(converted)(x), converted(x))
    with pytest.warns(QuantizationWarning, match="have seen no data"):
        fresh = tc.convert_fx(prepared)
    assert not torch.equal(fresh(x), converted(x))
    fresh.load_state_dict(converted.state_dict())
    assert torch.equal(fresh(x), converted(x))


def test_no_example_inputs() -> None:
    config = PrepareCustomConfig().set_standalone_module_name("block", None, (), None, None)
    with pytest.raises(tc.TorchQCompatError, match="standalone module 'block' has no example_inputs"):
        tc.prepare_fx(build(), MAPPING, images()[0], config)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8)
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        output, state = self.lstm(x)
        return self.fc(output), state


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(4, 4)
        self.encoder = Encoder()
        self.lstm = nn.LSTM(4, 4, bidirectional=True)
        self.back = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        encoded, (_, c) = self.encoder(self.front(x))
        return self.back(self.lstm(encoded)[0]), c


@pytest.mark.parametrize("interface", [([], []), ([0], [0, 1])], ids=["float", "quantized"])
def test_a_custom_lstm_inside(interface: Any) -> None:
    """FX fails (B14)."""
    torch.manual_seed(0)
    model, x = Speech().eval(), torch.randn(6, 3, 4)
    inside = inner(*interface).set_float_to_observed_mapping(nn.LSTM, torch.ao.nn.quantizable.LSTM)
    config = PrepareCustomConfig().set_float_to_observed_mapping(nn.LSTM, torch.ao.nn.quantizable.LSTM)
    config.set_standalone_module_name("encoder", None, (x,), inside, None)
    prepared = tc.prepare_fx(model, MAPPING, (x,), config)
    longer = torch.randn(9, 2, 4)
    with torch.no_grad():
        for a, b in zip(leaves(model(longer)), leaves(prepared(longer)), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
        converted = tc.convert_fx(prepared)
        assert isinstance(converted.get_submodule("encoder.lstm.layers.0.layer_fw.cell"), GraphModule)
        for a, b in zip(leaves(model(longer)), leaves(converted(longer)), strict=True):
            assert 25 < sqnr(a, b) < 60


def test_training() -> None:
    torch.manual_seed(0)
    model = Net().train()
    mapping = get_default_qat_qconfig_mapping("qnnpack")
    prepared = tc.prepare_qat_fx(model, mapping, images()[0], by_name(mapping, inner([0], [0])))
    optimizer = torch.optim.SGD(prepared.parameters(), 0.05)
    for (x,) in images():
        prepared(x).square().mean().backward()
        assert prepared.block.conv.weight.grad.abs().max() > 0
        optimizer.step()
        optimizer.zero_grad()
    prepared.eval()
    with torch.no_grad():
        x = images()[0][0]
        assert sqnr(prepared(x), tc.convert_fx(prepared)(x)) > 30


class Branching(nn.Module):
    """A module that torch.export cannot capture: a branch on data, around an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 6)
        self.lstm = nn.LSTM(4, 6)

    def forward(self, x: Tensor, scale: float = 2.0) -> Any:
        output, (h, _) = self.lstm(x)
        if float(x.sum()) > 1e9:
            scale = -scale
        return {"a": self.fc(x) * scale, "b": (output, h)}


class Plain(Branching):
    def forward(self, x: Tensor, scale: float = 2.0) -> Any:
        output, (h, _) = self.lstm(x)
        return {"a": self.fc(x) * scale, "b": (output, h)}


class Around(nn.Module):
    def __init__(self, inner_module: nn.Module) -> None:
        super().__init__()
        self.front = nn.Linear(4, 4)
        self.inner = inner_module
        self.back = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = self.inner(self.front(x))
        y = self.back(found["a"]) + self.back(found["b"][0]).reshape(x.shape[0], x.shape[1], 3)
        return y, found["b"][1]


@pytest.mark.parametrize("inner_class", [Plain, Branching])
@pytest.mark.parametrize("by", ["name", "class"])
def test_non_traceable_modules_stay_one_float_call(inner_class: type[nn.Module], by: str) -> None:
    torch.manual_seed(0)
    model, x = Around(inner_class()).eval(), torch.randn(5, 2, 4)
    config = copy.deepcopy(MAP_LSTM)
    if by == "name":
        config.set_non_traceable_module_names(["inner"])
    else:
        config.set_non_traceable_module_classes([inner_class])
    prepared = tc.prepare_fx(model, MAPPING, (x,), config)
    other = torch.randn(7, 3, 4)
    calibrate(prepared, [(x,), (other,)])
    converted = tc.convert_fx(prepared)
    assert [n.target for n in converted.graph.nodes if n.op == "call_module"] == ["inner"]
    assert converted.inner.fc.weight.dtype is torch.float32
    assert type(converted.inner.lstm) is nn.LSTM
    decision = tc.explain(converted).find("inner")[0]
    assert (decision.action.value, decision.reason) == ("float", "non_traceable: never quantized inside")
    with torch.no_grad():
        for a, b in zip(leaves(model(other)), leaves(converted(other)), strict=True):
            assert 25 < sqnr(a, b) < 60


def test_a_module_of_torch_nn_is_a_leaf_anyway() -> None:
    """A Linear named non-traceable is therefore quantized, in FX as well."""
    model = nn.Sequential(nn.Linear(4, 4)).eval()
    config = PrepareCustomConfig().set_non_traceable_module_classes([nn.Linear])
    prepared = tc.prepare_fx(model, MAPPING, (torch.randn(2, 4),), config)
    assert tc.explain(prepared).find("0")[0].action.value == "quantized"


class Positive(nn.Module):
    """The size of the result depends on the data."""

    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0]


class Halved(nn.Module):
    """A size of the result is no size of the input, and the module branches on data."""

    def forward(self, x: Tensor) -> Tensor:
        return x if float(x.sum()) > 1e9 else x[: len(x) // 2]


class Doubling(nn.Module):
    def __init__(self, inner_module: nn.Module) -> None:
        super().__init__()
        self.inner = inner_module

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * 2


def test_a_size_that_depends_on_data() -> None:
    config = PrepareCustomConfig().set_non_traceable_module_names(["inner"])
    model = Doubling(Positive()).eval()
    prepared = tc.prepare_fx(model, MAPPING, (torch.randn(4, 4),), config)
    x = torch.randn(9, 4)
    assert torch.equal(prepared(x), model(x))


def test_a_size_that_is_none_of_the_inputs() -> None:
    config, model = PrepareCustomConfig().set_non_traceable_module_names(["inner"]), Doubling(Halved()).eval()
    prepared = tc.prepare_fx(model, MAPPING, (torch.randn(4, 4),), config)
    for size in (4, 9, 2, 31):
        x = torch.randn(size, 4)
        assert torch.equal(prepared(x), model(x))
