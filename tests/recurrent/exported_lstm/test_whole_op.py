"""whole_op_lstm_quantizer: aten.lstm.input stays one op, with q-dq on all its inputs and outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.fake_quantize import FusedMovingAvgObsFakeQuantize
from torchao.quantization.pt2e.observer import MinMaxObserver, PerChannelMinMaxObserver
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_qat_pt2e
from torchao.quantization.pt2e.quantizer import ComposableQuantizer, QuantizationSpec

from tests.helpers.oracle import leaves, sqnr
from tests.helpers.quantizers import prepared_by_torchao
from torchq_compat.errors import QuantizationWarning
from torchq_compat.pt2e import whole_op_lstm_quantizer, whole_op_recurrent_quantizer
from torchq_compat.recurrent.exported_lstm.aten_recurrent import KINDS

OPS = torch.ops.quantized_decomposed
PER_TENSOR, PER_CHANNEL = OPS.dequantize_per_tensor.default, OPS.dequantize_per_channel.default
MINMAX = QuantizationSpec(torch.int8, MinMaxObserver, -128, 127, torch.per_tensor_affine)

Batch = tuple[Tensor, tuple[Tensor, Tensor]]


class Model(nn.Module):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, **kwargs)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None = None) -> Any:
        return self.lstm(x, state)


def batches(**kwargs: Any) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    rows = kwargs.get("num_layers", 1) * (2 if kwargs.get("bidirectional") else 1)
    widths = (kwargs.get("proj_size", 0) or 16, 16)
    shape = (3, 12, 8) if kwargs.get("batch_first") else (12, 3, 8)

    def batch() -> Batch:
        h, c = (torch.rand(rows, 3, width, generator=generator) - 0.5 for width in widths)
        return torch.randn(shape, generator=generator), (h, c)

    return [batch() for _ in range(4)]


def quantize(model: nn.Module, data: list[Any], quantizer: Any) -> GraphModule:
    converted: GraphModule = convert_pt2e(prepared_by_torchao(model, quantizer, data))
    return converted


def lstm_node(converted: GraphModule) -> Node:
    (node,) = [n for n in converted.graph.nodes if n.target is torch.ops.aten.lstm.input]
    return node


def dq(node: Any) -> tuple[float, int, torch.dtype]:
    """Return (scale, zero point, dtype) of a per-tensor dequantize."""
    assert node.target is PER_TENSOR
    return node.args[1], node.args[2], node.args[5]


VARIANTS: list[dict[str, Any]] = [
    {},
    {"bias": False},
    {"num_layers": 2},
    {"bidirectional": True},
    {"batch_first": True},
    {"num_layers": 2, "bidirectional": True, "batch_first": True},
    {"proj_size": 5, "num_layers": 2},
]


@pytest.mark.parametrize("kwargs", VARIANTS, ids=str)
def test_every_input_weight_bias_and_output_is_quantized(kwargs: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, data = Model(**kwargs).eval(), batches(**kwargs)
    converted = quantize(model, data, whole_op_lstm_quantizer())
    node = lstm_node(converted)
    x, (h0, c0), parameters = node.args[:3]

    assert [dq(argument)[2] for argument in (x, h0, c0)] == [torch.int8] * 3
    biases = sum(p.dim() == 1 for p in model.parameters())
    assert [dq(p)[2] for p in parameters].count(torch.int32) == biases
    assert [dq(p)[2] for p in parameters].count(torch.int8) == len(parameters) - biases
    for parameter in parameters:
        stored = converted.get_buffer(str(parameter.args[0].target))
        assert stored.dtype is parameter.args[5]  # folded: the graph holds integers

    getitems = sorted(node.users)
    assert len(getitems) == 3
    outputs = []
    for getitem in getitems:
        (quantize_node,) = getitem.users
        assert quantize_node.target is OPS.quantize_per_tensor.default
        (dequantize,) = quantize_node.users
        outputs.append(dq(dequantize))
    assert outputs == [dq(h0), dq(h0), dq(c0)]

    with torch.no_grad():
        for expected, result in zip(leaves(model(*data[0])), leaves(converted(*data[0])), strict=True):
            assert 30 < sqnr(expected, result) < 55


@pytest.mark.parametrize("layers", [1, 2])
def test_bias_scales_are_those_of_the_accumulators(layers: int) -> None:
    model, data = Model(num_layers=layers).eval(), batches(num_layers=layers)
    x, (h0, _), parameters = lstm_node(quantize(model, data, whole_op_lstm_quantizer())).args[:3]
    for layer in range(layers):
        w_ih, w_hh, b_ih, b_hh = parameters[4 * layer : 4 * layer + 4]
        assert dq(b_ih)[:2] == (pytest.approx(dq(w_ih)[0] * dq(h0 if layer else x)[0], rel=1e-6), 0)
        assert dq(b_hh)[:2] == (pytest.approx(dq(w_hh)[0] * dq(h0)[0], rel=1e-6), 0)


def test_hidden_state_omitted() -> None:
    """h0 has the hidden state's qparams: its zeros alone would give a scale that saturates the bias."""
    torch.manual_seed(0)
    model, data = Model().eval(), [(x,) for x, _ in batches()]
    with torch.no_grad():
        model.lstm.bias_hh_l0.mul_(10)
    converted = quantize(model, data, whole_op_lstm_quantizer())
    _, _, (_, _, _, b_hh) = lstm_node(converted).args[:3]
    stored = converted.get_buffer(str(b_hh.args[0].target))
    assert stored.abs().max() < 2**31 - 1
    with torch.no_grad():
        for expected, result in zip(leaves(model(*data[0])), leaves(converted(*data[0])), strict=True):
            assert 33 < sqnr(expected, result) < 55


def test_one_tensor_as_both_states() -> None:
    """torchao has one edge for a tensor used as both states, so hidden and cell state share their qparams."""

    class Tied(Model):
        def forward(self, x: Tensor, state: Tensor) -> Any:
            return self.lstm(x, (state, state))

    torch.manual_seed(0)
    model, data = Tied().eval(), [(x, h) for x, (h, _) in batches()]
    converted = quantize(model, data, whole_op_lstm_quantizer())
    _, (h0, c0), _ = lstm_node(converted).args[:3]
    assert h0 is c0 or dq(h0) == dq(c0)
    with torch.no_grad():
        for expected, result in zip(leaves(model(*data[0])), leaves(converted(*data[0])), strict=True):
            assert 30 < sqnr(expected, result) < 55


def test_weights_per_channel() -> None:
    weight = QuantizationSpec(
        torch.int8, PerChannelMinMaxObserver, -127, 127, torch.per_channel_symmetric, ch_axis=0
    )
    torch.manual_seed(0)
    model, data = Model().eval(), batches()
    converted = quantize(model, data, whole_op_lstm_quantizer(weight=weight))
    _, (h0, _), parameters = lstm_node(converted).args[:3]
    assert {p.target for p in parameters} == {PER_CHANNEL}
    scales = [converted.get_buffer(str(p.args[1].target)) for p in parameters]
    expected = model.lstm.weight_hh_l0.abs().amax(1) / 127
    torch.testing.assert_close(scales[1], expected.detach(), rtol=1e-5, atol=0)
    torch.testing.assert_close(scales[3], scales[1] * dq(h0)[0])
    with torch.no_grad():
        assert 33 < sqnr(model(*data[0])[0], converted(*data[0])[0]) < 55


def test_in_a_composition_the_first_quantizer_wins() -> None:
    first, second = whole_op_lstm_quantizer(activation=MINMAX), whole_op_lstm_quantizer()
    model, data = Model().eval(), batches()
    composed = quantize(model, data, ComposableQuantizer([first, second]))
    alone = quantize(model, data, whole_op_lstm_quantizer(activation=MINMAX))
    x = lstm_node(composed).args[0]
    observer = MinMaxObserver(
        dtype=torch.int8, quant_min=-128, quant_max=127, qscheme=torch.per_tensor_affine
    )
    for batch, _ in data:
        observer(batch)
    assert dq(x)[0] == pytest.approx(float(observer.calculate_qparams()[0]), rel=1e-6)
    assert all(
        torch.equal(a, b) for a, b in zip(leaves(composed(*data[0])), leaves(alone(*data[0])), strict=True)
    )


def test_qat_trains_through_the_whole_op() -> None:
    def fake(qscheme: torch.qscheme) -> QuantizationSpec:
        return QuantizationSpec(torch.int8, FusedMovingAvgObsFakeQuantize, -128, 127, qscheme)

    quantizer = whole_op_lstm_quantizer(
        activation=fake(torch.per_tensor_affine), weight=fake(torch.per_tensor_symmetric)
    )
    model, data = Model().eval(), batches()
    prepared = prepare_qat_pt2e(torch.export.export(model, data[0]).module(), quantizer)
    prepared(*data[0])[0].square().mean().backward()
    gradients = [parameter.grad for parameter in prepared.parameters()]
    assert len(gradients) == 4
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients)
    converted = convert_pt2e(prepared)
    with torch.no_grad():
        assert 28 < sqnr(model(*data[0])[0], converted(*data[0])[0]) < 55


def test_saved_and_exported_again(tmp_path: Any) -> None:
    model, data = Model(num_layers=2).eval(), batches(num_layers=2)
    converted = quantize(model, data, whole_op_lstm_quantizer())
    torch.export.save(torch.export.export(converted, data[0]), tmp_path / "lstm.pt2")
    loaded = torch.export.load(tmp_path / "lstm.pt2").module()
    for expected, result in zip(leaves(converted(*data[1])), leaves(loaded(*data[1])), strict=True):
        assert torch.equal(expected, result)


@pytest.mark.parametrize("states", [True, False])
def test_weights_may_stay_float(states: bool) -> None:
    """As the operator of ExecuTorch's Cortex-M backend wants it, for LSTM, GRU and RNN in one call."""

    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.gru, self.rnn = nn.LSTM(8, 8), nn.GRU(8, 8), nn.RNN(8, 8)

        def forward(self, x: Tensor) -> Any:
            return self.lstm(x), self.gru(x), self.rnn(x)

    torch.manual_seed(0)
    model, data = Three().eval(), [(torch.randn(6, 3, 8),) for _ in range(3)]
    converted = quantize(model, data, whole_op_recurrent_quantizer(weights=False, states=states))
    for op in list(KINDS)[:3]:
        (node,) = (each for each in converted.graph.nodes if each.target is op)
        x, given, parameters = node.args[:3]
        assert dq(x)[2] is torch.int8
        assert all(each.op == "get_attr" for each in parameters)
        for each in given if isinstance(given, (tuple, list)) else (given,):
            assert (each.target is PER_TENSOR) is states
        observed = {getitem.args[1]: next(iter(getitem.users)).target for getitem in node.users}
        assert {at for at, target in observed.items() if target is OPS.quantize_per_tensor.default} == (
            set(observed) if states else {0}
        )
    for expected, result in zip(leaves(model(*data[0])), leaves(converted(*data[0])), strict=True):
        assert 30 < sqnr(expected, result) < 60


def test_a_gru_is_told_by_the_quantizer_of_lstms() -> None:
    data = [(torch.randn(6, 3, 8),)]
    with pytest.warns(
        QuantizationWarning, match=r"finds no aten\.lstm\.input, and leaves aten\.gru\.input.*TQ428"
    ):
        prepared_by_torchao(nn.GRU(8, 8).eval(), whole_op_lstm_quantizer(), data)
