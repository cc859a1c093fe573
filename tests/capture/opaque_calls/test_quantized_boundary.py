"""The graph around a custom-module LSTM, none of which depends on the sequence length."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import MinMaxObserver, QConfig, QConfigMapping, default_weight_observer
from torch.fx import GraphModule, Node

from tests.helpers.once import made_once
from tests.helpers.oracle import MAP_LSTM, by_fx, by_us, count_nodes, quantize_nodes
from torchq_compat.annotate.observed_graph import observer_nodes

INPUTS, HIDDEN = 8, 16
QCONFIG = QConfig(MinMaxObserver, default_weight_observer)
MAPPING = QConfigMapping().set_global(QCONFIG)

OPS = torch.ops.quantized_decomposed
QUANTIZE, DEQUANTIZE = OPS.quantize_per_tensor.default, OPS.dequantize_per_tensor.default
LINEAR = torch.ops.aten.linear.default


class OneLSTM(nn.Module):
    def __init__(self, num_layers: int = 1, *, bidirectional: bool = False) -> None:
        super().__init__()
        self.lstm = nn.LSTM(INPUTS, HIDDEN, num_layers, bidirectional=bidirectional)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, (h_n, c_n) = self.lstm(x, (h, c))
        return y, h_n, c_n


def batch(steps: int = 5, size: int = 3, rows: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(steps, size, INPUTS), *(0.3 * torch.randn(rows, size, HIDDEN) for _ in range(2))


def quantized(model: nn.Module, mapping: QConfigMapping = MAPPING) -> tuple[GraphModule, GraphModule]:
    """Return (prepared, converted)."""
    return by_us(model.eval(), mapping, [batch() for _ in range(2)], MAP_LSTM)


@made_once
def one_lstm(num_layers: int, directions: int, steps: int) -> tuple[OneLSTM, GraphModule, GraphModule]:
    """Return (float, prepared, converted)."""
    model = OneLSTM(num_layers, bidirectional=directions == 2).eval()
    batches = [batch(steps, rows=num_layers * directions) for _ in range(2)]
    return model, *by_us(model, MAPPING, batches, MAP_LSTM)


def placeholders(graph_module: GraphModule) -> dict[str, Node]:
    return {node.name: node for node in graph_module.graph.nodes if node.op == "placeholder"}


def calls(graph_module: GraphModule) -> list[Node]:
    """Return the LSTM calls of a converted graph, in order."""
    return [node for node in graph_module.graph.nodes if node.op == "call_module"]


def linears(graph_module: GraphModule) -> list[Node]:
    return [node for node in graph_module.graph.nodes if node.target is LINEAR]


def results(call: Node) -> dict[int, Node]:
    """Return the getitems of the used results of an LSTM call, by index."""
    assert all(user.target is operator.getitem for user in call.users)
    return {int(user.args[1]): user for user in call.users}  # type: ignore[arg-type]


def test_every_input_is_observed_and_quantized_once() -> None:
    _, prepared, converted = one_lstm.itself(1, 1, 5)
    assert len(list(observer_nodes(prepared))) == 3
    (call,) = calls(converted)
    assert [arg.target for arg in call.args] == [QUANTIZE] * 3
    for placeholder, arg in zip(placeholders(converted).values(), call.args, strict=True):
        assert list(placeholder.users) == [arg]
    assert len(quantize_nodes(converted)) == 3


def test_the_number_of_quantize_nodes_is_that_of_fx() -> None:
    model, _, ours = one_lstm.itself(1, 1, 5)
    _, theirs = by_fx(model, MAPPING, [batch()], MAP_LSTM)
    of_fx = [node for node in theirs.graph.nodes if node.target is torch.quantize_per_tensor]
    assert len(quantize_nodes(ours)) == len(of_fx) == 3


class OneState(OneLSTM):
    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        y, _ = self.lstm(x, (h, h))
        return y


def test_one_node_for_both_states_gives_one_observer() -> None:
    model = OneState().eval()
    prepared, converted = by_us(model, MAPPING, [batch()[:2]], MAP_LSTM)
    observed = [str(node.args[0]) for node, _ in observer_nodes(prepared)]
    assert observed == ["x", "h"]
    (call,) = calls(converted)
    assert call.args[1] is call.args[2]
    assert len(quantize_nodes(converted)) == 2
    fx_prepared, _ = by_fx(model, MAPPING, [batch()[:2]], MAP_LSTM)
    of_fx = [
        node for node in fx_prepared.graph.nodes if str(node.target).startswith("activation_post_process")
    ]
    assert len(of_fx) == 2


class BehindLinear(OneLSTM):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(INPUTS, INPUTS)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Tensor:
        y, _ = self.lstm(self.inp(x), (h, c))
        return y


def test_an_input_that_is_quantized_already_is_not_observed_again() -> None:
    """The output observer of the Linear observes the LSTM's input."""
    prepared, converted = quantized(BehindLinear())
    activations = [
        str(node.args[0]) for node, _ in observer_nodes(prepared) if "weight" not in str(node.args[0])
    ]
    assert sorted(activations) == ["c", "h", "linear", "x"]
    (linear,), (call,) = linears(converted), calls(converted)
    assert call.args[0].target is QUANTIZE
    assert call.args[0].args[0] is linear


class SharedInput(OneLSTM):
    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(INPUTS, HIDDEN)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        y, _ = self.lstm(x, (h, c))
        return y, self.side(x)


def test_an_input_with_another_consumer_is_quantized_once_for_both() -> None:
    _, converted = quantized(SharedInput())
    (quantize,) = placeholders(converted)["x"].users
    (linear,), (call,) = linears(converted), calls(converted)
    assert call.args[0] is quantize
    assert linear.args[0].target is DEQUANTIZE
    assert linear.args[0].args[0] is quantize


class TwoConsumers(OneLSTM):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(HIDDEN, 4), nn.Linear(HIDDEN, 4)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        y, _ = self.lstm(x, (h, c))
        return self.a(y), self.b(y)


@pytest.mark.parametrize("kept_float", [(), ("a",), ("a", "b")])
def test_one_dequantize_and_no_second_quantize_in_front_of_consumers(kept_float: tuple[str, ...]) -> None:
    """Whether a consumer is quantized in the same dtype or its qconfig is None makes no difference."""
    mapping = QConfigMapping().set_global(QCONFIG)
    for name in kept_float:
        mapping.set_module_name(name, None)
    prepared, converted = quantized(TwoConsumers(), mapping)
    assert not any("getitem" in str(node.args[0]) for node, _ in observer_nodes(prepared))
    (call,) = calls(converted)
    getitem = results(call)[0]
    (dequantize,) = getitem.users
    assert dequantize.target is DEQUANTIZE
    assert set(dequantize.users) == set(linears(converted))
    # x, h, c and the outputs of the consumers that are quantized.
    assert len(quantize_nodes(converted)) == 3 + 2 - len(kept_float)
    float_weights = {name for name, _ in converted.named_parameters() if name in ("a.weight", "b.weight")}
    assert float_weights == {f"{name}.weight" for name in kept_float}


class Unused(OneLSTM):
    def __init__(self, pick: Callable[..., Tensor]) -> None:
        super().__init__()
        self.pick = pick

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Tensor:
        return self.pick(self.lstm(x, (h, c)))


@pytest.mark.parametrize(
    ("pick", "index"),
    [(lambda r: r[0], 0), (lambda r: r[1][0], 1), (lambda r: r[1][1], 2)],
    ids=["output", "h_n", "c_n"],
)
def test_an_unused_output_leaves_no_node(pick: Callable[..., Tensor], index: int) -> None:
    _, converted = quantized(Unused(pick))
    (call,) = calls(converted)
    assert list(results(call)) == [index]
    dequantizes = [node for node in converted.graph.nodes if node.target is DEQUANTIZE]
    assert [node.args[0] for node in dequantizes] == [results(call)[index]]
    # 3 placeholders, 3 quantizes, the call, a getitem, a dequantize, the output.
    assert len(converted.graph.nodes) == 10


@pytest.mark.parametrize("bidirectional", [False, True])
def test_every_used_output_leaves_through_one_dequantize(bidirectional: bool) -> None:
    """Layers and directions have their own qparams, so h_n and c_n with several rows are per-channel."""
    *_, converted = one_lstm.itself(2, 2, 5) if bidirectional else one_lstm.itself(1, 1, 5)
    (call,) = calls(converted)
    for getitem in results(call).values():
        (dequantize,) = getitem.users
        assert "dequantize_per" in str(dequantize.target)
        assert getitem.meta["val"].dtype is torch.uint8
    assert sorted(results(call)) == [0, 1, 2]
    per_channel = [n for n in converted.graph.nodes if n.target is OPS.dequantize_per_channel.default]
    assert len(per_channel) == (3 if bidirectional else 0)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LSTM(INPUTS, HIDDEN), nn.LSTM(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Tensor:
        y, state = self.first(x, (h, c))
        z, _ = self.second(y, state)
        return z


def test_an_lstm_hands_its_integers_to_the_next() -> None:
    _, converted = quantized(Chain())
    first, second = calls(converted)
    assert [arg.target for arg in second.args] == [operator.getitem] * 3
    assert list(second.args) == [results(first)[index] for index in range(3)]
    # Only the result of the second LSTM is dequantized.
    assert sum(node.target is DEQUANTIZE for node in converted.graph.nodes) == 1
    assert len(quantize_nodes(converted)) == 3


class TwoRanges(OneLSTM):
    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        y, _ = self.lstm(x, (h, c))
        z, _ = self.lstm(torch.tanh(x), (h, c))
        return y, z


def test_two_calls_have_each_their_own_input_qparams() -> None:
    """FX keeps a single observer for all calls of a custom module."""
    _, converted = quantized(TwoRanges())
    first, second = calls(converted)
    assert first.target == second.target == "lstm"
    scales = [float(call.args[0].args[1]) for call in (first, second)]  # type: ignore[union-attr]
    assert scales[0] > 2 * scales[1]


class LeftFloat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(INPUTS, INPUTS), nn.Linear(HIDDEN, 4)
        self.lstm = nn.LSTM(INPUTS, HIDDEN)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Tensor:
        y, _ = self.lstm(self.inp(x), (h, c))
        return self.out(y)


def test_a_float_lstm_takes_and_gives_floats() -> None:
    """With qconfig None it stays nn.LSTM, and its consumers have ordinary input observers."""
    mapping = QConfigMapping().set_global(QCONFIG).set_module_name("lstm", None)
    _, converted = quantized(LeftFloat(), mapping)
    (call,) = calls(converted)
    assert type(converted.lstm) is nn.LSTM
    assert call.args[0].target is DEQUANTIZE
    assert [str(arg) for arg in call.args[1]] == ["h", "c"]
    (getitem,) = call.users
    (quantize,) = getitem.users
    assert quantize.target is QUANTIZE
    # x, the output of inp, the output of lstm, the output of out.
    assert len(quantize_nodes(converted)) == 4


def cell_paths(num_layers: int, *, bidirectional: bool) -> list[str]:
    names = ("layer_fw", "layer_bw")[: 2 if bidirectional else 1]
    return [f"lstm.layers.{layer}.{name}.cell" for layer in range(num_layers) for name in names]


@pytest.mark.parametrize(("num_layers", "bidirectional"), [(1, False), (2, False), (2, True)])
def test_the_cells_stand_at_their_paths(num_layers: int, bidirectional: bool) -> None:
    _, *stages = one_lstm.itself(num_layers, 2 if bidirectional else 1, 5)
    for graph_module, has_observers in zip(stages, (True, False), strict=True):
        found = [path for path, m in graph_module.named_modules() if path and isinstance(m, GraphModule)]
        assert found == cell_paths(num_layers, bidirectional=bidirectional)
        for path in found:
            cell = graph_module.get_submodule(path)
            assert isinstance(cell, GraphModule)
            # 12 parts, and the weights of the two linears.
            assert len(list(observer_nodes(cell))) == (14 if has_observers else 0)
            assert len(quantize_nodes(cell)) == (0 if has_observers else 12)


def test_the_weights_of_a_cell_are_int8_and_nothing_else_is_left() -> None:
    *_, converted = one_lstm.itself(2, 2, 5)
    for path in cell_paths(2, bidirectional=True):
        cell = converted.get_submodule(path)
        assert isinstance(cell, GraphModule)
        first = INPUTS if ".0." in path else 2 * HIDDEN
        integers = [tuple(b.shape) for b in cell.buffers() if b.dtype is torch.int8]
        assert integers == [(4 * HIDDEN, first), (4 * HIDDEN, HIDDEN)]
        floats = [tuple(p.shape) for p in cell.parameters()]
        assert floats == [(4 * HIDDEN,)] * 2
        for linear in linears(cell):
            weight = linear.args[1]
            assert isinstance(weight, Node)
            assert weight.target is DEQUANTIZE
            assert weight.args[0].op == "get_attr"


def counts(steps: int) -> dict[str, int]:
    """Return the counts that must not grow with the sequence length."""
    _, prepared, converted = one_lstm.itself(2, 2, steps)
    quantizes = [
        node for m in converted.modules() if isinstance(m, GraphModule) for node in quantize_nodes(m)
    ]
    return {
        "modules prepared": len(list(prepared.modules())),
        "nodes prepared": count_nodes(prepared),
        "modules converted": len(list(converted.modules())),
        "nodes converted": count_nodes(converted),
        "buffers converted": len(list(converted.buffers())),
        "quantizes": len(quantizes),
        "distinct qparams": len({node.args[1:3] for node in quantizes}),
    }


def test_what_the_counts_are() -> None:
    found = counts(5)
    # x, h, c; 12 parts of 4 cells.
    assert found["quantizes"] == 3 + 4 * 12
    # 7 observed parts of each cell are distinct; sigmoid and tanh have one fixed pair each.
    assert found["distinct qparams"] == 3 + 4 * 7 + 2


@pytest.mark.parametrize("steps", [33, pytest.param(512, marks=pytest.mark.slow)])
def test_counts_do_not_depend_on_the_sequence_length(steps: int) -> None:
    assert counts(steps) == counts(5)
