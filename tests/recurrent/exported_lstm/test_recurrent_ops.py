"""GRU and RNN of an exported program, treated as the LSTM is: whole, and decomposed in three shapes.

Oracles: the float model; and, bit for bit, the shapes among each other.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from tests.helpers.once import made_once
from tests.helpers.oracle import leaves, sqnr
from tests.helpers.quantizers import of_arithmetic
from torchq_compat.errors import AnnotationError, QuantizationWarning
from torchq_compat.pt2e import (
    convert_decomposed_lstm,
    decompose_lstm,
    decompose_recurrent,
    prepare_decomposed_lstm,
    whole_op_lstm_quantizer,
    whole_op_recurrent_quantizer,
)

ATEN, OPS = torch.ops.aten, torch.ops.quantized_decomposed
SHAPES = ["rolled", "unrolled", "opaque"]

#: (class, its options, the operator that torch.export turns it into)
VARIANTS: list[Any] = [
    (nn.GRU, {"batch_first": True}, ATEN.gru.input),
    (nn.RNN, {"batch_first": True}, ATEN.rnn_tanh.input),
    (nn.RNN, {"nonlinearity": "relu", "bias": False}, ATEN.rnn_relu.input),
    (nn.LSTM, {"proj_size": 5}, ATEN.lstm.input),
    *(
        pytest.param((cls, {**options, **more}, op), marks=pytest.mark.slow)
        for cls, options, op in (
            (nn.GRU, {}, ATEN.gru.input),
            (nn.RNN, {}, ATEN.rnn_tanh.input),
            (nn.RNN, {"nonlinearity": "relu"}, ATEN.rnn_relu.input),
            (nn.LSTM, {}, ATEN.lstm.input),
            (nn.LSTM, {"proj_size": 5}, ATEN.lstm.input),
        )
        for more in (
            {},
            {"num_layers": 2},
            {"bidirectional": True},
            {"num_layers": 2, "bidirectional": True, "batch_first": True},
        )
    ),
]


class Model(nn.Module):
    def __init__(self, cls: type[nn.Module], options: dict[str, Any]) -> None:
        super().__init__()
        self.rnn = cls(6, 10, **options)

    def forward(self, x: Tensor, *states: Tensor) -> Any:
        return self.rnn(x, states if len(states) > 1 else states[0])


def batch(cls: type[nn.Module], options: dict[str, Any], seed: int, steps: int = 7) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    rows = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
    widths = [options.get("proj_size", 10), 10][: 2 if cls is nn.LSTM else 1]
    shape = (3, steps, 6) if options.get("batch_first") else (steps, 3, 6)
    states = [torch.rand(rows, 3, width, generator=generator) - 0.5 for width in widths]
    return torch.randn(shape, generator=generator), *states


@made_once
def exported(cls: type[nn.Module], **options: Any) -> tuple[nn.Module, ExportedProgram]:
    """Return a model and its program."""
    torch.manual_seed(0)
    model = Model(cls, options).eval()
    return model, torch.export.export(model, batch(cls, options, 0))


def calibrated(prepared: GraphModule, cls: type[nn.Module], options: dict[str, Any]) -> GraphModule:
    with torch.no_grad():
        for seed in range(4):
            prepared(*batch(cls, options, seed))
    return prepared


def within(model: nn.Module, module: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    with torch.no_grad():
        expected, results = leaves(model(*inputs)), leaves(module(*inputs))
    for value, result in zip(expected, results, strict=True):
        assert 25 < sqnr(value, result) < 60
    return results


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_decomposed_in_three_shapes_with_the_same_bits(variant: Any) -> None:
    cls, options, op = variant
    (model, program), inputs = exported.itself(cls, **options), batch(cls, options, 0)
    assert [node.target for node in program.graph.nodes].count(op) == 1
    results = []
    for shape in SHAPES:
        decomposed = decompose_recurrent(program, shape)
        assert all(node.target is not op for node in decomposed.graph.nodes)
        torch.testing.assert_close(leaves(decomposed(*inputs)), leaves(model(*inputs)), rtol=0, atol=1e-6)
        prepared = calibrated(prepare_decomposed_lstm(decomposed, of_arithmetic()), cls, options)
        results.append(within(model, convert_decomposed_lstm(prepared), inputs))
    for first, *others in zip(*results, strict=True):
        assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_whole(variant: Any) -> None:
    """There is q-dq at x, each state, weight, bias and output; h0, output and h_n have the same qparams."""
    cls, options, op = variant
    (model, program), inputs = exported.itself(cls, **options), batch(cls, options, 0)
    prepared = prepare_pt2e(program.module(), whole_op_recurrent_quantizer())
    converted = convert_pt2e(calibrated(prepared, cls, options))
    (node,) = [n for n in converted.graph.nodes if n.target is op]
    dequantize = OPS.dequantize_per_tensor.default
    assert {each.target for each in node.all_input_nodes} == {dequantize}
    dtypes = [each.args[5] for each in node.args[2]]
    biases = sum(parameter.dim() == 1 for parameter in model.parameters())
    assert dtypes.count(torch.int32) == biases
    assert dtypes.count(torch.int8) == len(list(model.parameters())) - biases
    behind = [next(iter(next(iter(getitem.users)).users)) for getitem in sorted(node.users)]
    states = node.args[1] if isinstance(node.args[1], (tuple, list)) else [node.args[1]]
    assert [each.args[1:3] for each in behind] == [each.args[1:3] for each in (states[0], *states)]
    within(model, converted, inputs)


def test_whole_lstm_leaves_the_others() -> None:
    with pytest.warns(QuantizationWarning, match=r"leaves aten.gru.input float.*\[TQ428\]"):
        prepared = prepare_pt2e(exported.itself(nn.GRU)[1].module(), whole_op_lstm_quantizer())
    assert all(node.op != "call_module" or "guards" in node.name for node in prepared.graph.nodes)


def test_any_length_of_what_export_had_fixed() -> None:
    options = {"num_layers": 2, "bidirectional": True}
    model, program = exported.itself(nn.GRU, **options)
    longer = batch(nn.GRU, options, 5, steps=9)
    for shape in ("rolled", "opaque"):
        results = decompose_recurrent(program, shape)(*longer)
        torch.testing.assert_close(leaves(results), leaves(model(*longer)), rtol=0, atol=1e-6)


# -- refusals


def test_a_program_without_recurrent_operators_is_told_what_it_has() -> None:
    program = torch.export.export(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), (torch.ones(1, 2),))
    for decompose in (decompose_recurrent, decompose_lstm):
        with pytest.raises(AnnotationError, match=r"it has aten.linear.default, aten.relu.default") as error:
            decompose(program)
        assert "aten.lstm.input" in str(error.value)
    with pytest.raises(AnnotationError, match=r"decompose_recurrent decomposes aten.gru.input"):
        decompose_lstm(exported.itself(nn.GRU)[1])


@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU, nn.RNN])
def test_operators_of_packed_sequences_are_refused_by_name(cls: type[nn.Module]) -> None:
    op = {nn.LSTM: ATEN.lstm.data, nn.GRU: ATEN.gru.data, nn.RNN: ATEN.rnn_tanh.data}[cls]
    module = exported(cls)[1].module()
    (node,) = [n for n in module.graph.nodes if str(n.target).endswith(".input")]
    node.target = op
    for decompose in (decompose_recurrent, decompose_lstm):
        with pytest.raises(AnnotationError, match=str(op)):
            decompose(module)
    with pytest.raises(AnnotationError, match=str(op)):
        prepare_pt2e(module, whole_op_recurrent_quantizer())
