"""Graphs with integer inputs and outputs: input_quantized_indexes and output_quantized_indexes."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx as fx
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.ao.quantization.fx.custom_config import PrepareCustomConfig
from torch.fx import GraphModule

import torchq_compat as tc
from tests.helpers.engines import with_exact_sums
from tests.helpers.once import made_once
from tests.helpers.oracle import calibrate, leaves, quantize_nodes, sqnr
from torchq_compat.errors import QuantizationWarning
from torchq_compat.read.qparams import PerTensorQParams

MAPPING = get_default_qconfig_mapping("qnnpack")


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.b(self.a(x) + y), y


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8, 2, bidirectional=True)

    def forward(self, x: Tensor) -> Any:
        return self.lstm(x)


class Rebuilt(Whole):
    def forward(self, x: Tensor) -> Any:
        output, (h, c) = self.lstm(x)
        return output, (h, c)


def config(inputs: list[int], outputs: list[int]) -> PrepareCustomConfig:
    made = PrepareCustomConfig().set_input_quantized_indexes(inputs).set_output_quantized_indexes(outputs)
    return made.set_float_to_observed_mapping(nn.LSTM, torch.ao.nn.quantizable.LSTM)


def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return [(torch.randn(5, 4), torch.randn(5, 4)) for _ in range(5)]


def by_fx(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> GraphModule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = fx.prepare_fx(copy.deepcopy(model), MAPPING, data[0], config([0], [0]))
        calibrate(prepared, data)
        return with_exact_sums(fx.convert_fx(prepared))


def by_us(model: nn.Module, data: list[Any], inputs: list[int], outputs: list[int]) -> GraphModule:
    prepared = tc.prepare_fx(model, MAPPING, data[0], config(inputs, outputs))
    calibrate(prepared, data)
    return tc.convert_fx(prepared)


@made_once
def two_inputs(inputs: tuple[int, ...], outputs: tuple[int, ...], count: int = 5) -> tuple[nn.Module, Any]:
    """Return a float model, and it converted, calibrated with so many batches."""
    torch.manual_seed(0)
    model = TwoInputs().eval()
    return model, by_us(model, batches()[:count], list(inputs), list(outputs))


def test_integers_of_fx() -> None:
    (model, converted), data = two_inputs((0,), (0,)), batches()
    qparams = converted.input_qparams()[0]
    assert isinstance(qparams, PerTensorQParams)
    assert converted.input_qparams()[1] is None
    x, y = data[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        legacy_x = torch.quantize_per_tensor(x, qparams.scale, qparams.zero_point, torch.quint8)
    expected = by_fx(model, data)(legacy_x, y)[0]
    found = converted(qparams.quantize(x), y)[0]
    assert found.dtype is torch.uint8
    assert torch.equal(found, expected.int_repr())
    out = converted.output_qparams()[0]
    assert isinstance(out, PerTensorQParams)
    assert (out.scale, out.zero_point) == (expected.q_scale(), expected.q_zero_point())
    # A legacy caller's quantized tensor is accepted as well.
    assert torch.equal(converted(legacy_x, y)[0], found)


def test_the_graph_does_not_quantize_what_arrives_quantized() -> None:
    (_, plain), (_, integer), data = two_inputs((), ()), two_inputs((0,), (0,)), batches()
    assert len(quantize_nodes(plain)) - len(quantize_nodes(integer)) == 1
    placeholder = integer.reference.graph.find_nodes(op="placeholder")[0]
    assert placeholder.meta["val"].dtype is torch.uint8
    with torch.no_grad():
        x, y = data[2]
        all_qparams = integer.input_qparams(), integer.output_qparams()
        found = all_qparams[1][0].dequantize(integer(all_qparams[0][0].quantize(x), y)[0])
        assert torch.equal(found, plain(x, y)[0])


@pytest.mark.parametrize(
    ("model_class", "indexes", "integers"),
    [
        (Whole, [0], {0, 1, 2}),
        (Whole, [1], {1, 2}),
        (Rebuilt, [0], {0}),
        (Rebuilt, [0, 1], {0, 1, 2}),
        (Rebuilt, [1], {1, 2}),
    ],
)
def test_the_tuple_of_an_lstm(model_class: type[nn.Module], indexes: list[int], integers: set[int]) -> None:
    """FX ignores the setting for a tuple returned whole (B19), which counts as output 0 in FX."""
    torch.manual_seed(0)
    model, x = model_class().eval(), torch.randn(3, 4, 4)
    converted = by_us(model, [(x,)], [], indexes)
    with torch.no_grad():
        exact, found = leaves(model(x)), leaves(converted(x))
    assert {index for index, tensor in enumerate(found) if tensor.dtype is torch.uint8} == integers
    for float_value, value, qparams in zip(exact, found, converted.output_qparams(), strict=True):
        restored = value if qparams is None else qparams.dequantize(value)
        assert 28 < sqnr(float_value, restored) < 60


def test_a_quantized_input_goes_straight_into_an_lstm() -> None:
    torch.manual_seed(0)
    model, x = Whole().eval(), torch.randn(3, 4, 4)
    converted = by_us(model, [(x,)], [0], [])
    plain = by_us(model, [(x,)], [], [])
    qparams = converted.input_qparams()[0]
    assert qparams is not None
    with torch.no_grad():
        for a, b in zip(leaves(plain(x)), leaves(converted(qparams.quantize(x))), strict=True):
            assert torch.equal(a, b)


def test_an_output_no_op_observes() -> None:
    """The placeholder y itself is returned: the setting adds an observer."""
    (_, converted), data = two_inputs((), (1,)), batches()
    x, y = data[0]
    found, qparams = converted(x, y)[1], converted.output_qparams()[1]
    assert qparams is not None
    assert found.dtype is torch.uint8
    assert float((qparams.dequantize(found) - y).abs().max()) <= qparams.scale / 2 + 1e-6


def test_qparams_follow_loaded_states_and_copies() -> None:
    (_, trained), (_, fresh) = two_inputs((0,), (0,)), two_inputs((0,), (0,), 1)
    assert trained.input_qparams() != fresh.input_qparams()
    fresh.load_state_dict(trained.state_dict())
    assert fresh.input_qparams() == trained.input_qparams()
    assert copy.deepcopy(trained).output_qparams() == trained.output_qparams()


def test_bad_input() -> None:
    model, data = TwoInputs().eval(), batches()
    _, converted = two_inputs((0,), ())
    with pytest.raises(tc.TorchQCompatError, match=r"input 0 .* torch.uint8, got torch.float32") as caught:
        converted(*data[0])
    assert "input_qparams()[0].quantize(x)" in str(caught.value)
    for inputs, outputs, setting in (([2], [], "input"), ([], [2], "output"), ([-1], [], "input")):
        message = rf"{setting}_quantized_indexes has -?\d, and the model has 2"
        with pytest.warns(QuantizationWarning, match=message):
            by_us(model, data, inputs, outputs)


class Pool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.AvgPool2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(x)


def test_an_op_that_shares_the_qparams_of_a_quantized_input() -> None:
    """FX observes no quantized input, so the op is observed on its own in FX's reference; lowered it runs on
    the input's qparams. Here the input is observed, and the op shares its qparams in both forms."""
    model, x = Pool().eval(), torch.randn(2, 3, 9, 9)
    theirs = fx.prepare_fx(copy.deepcopy(model), MAPPING, (x,), config([0], []))
    ours = tc.prepare_fx(model, MAPPING, (x,), config([0], []))
    for prepared in (theirs, ours):
        calibrate(prepared, [(x,)])
    its_reference = fx.convert_to_reference_fx(copy.deepcopy(theirs))
    assert float(its_reference.pool_scale_0) < 0.7 * (x.max() - x.min()) / 255

    reference, lowered = tc.convert_to_reference_fx(ours), tc.convert_fx(ours)
    qparams = reference.input_qparams()[0]
    assert isinstance(qparams, PerTensorQParams)
    assert [n.args[1] for n in quantize_nodes(reference)] == [qparams.scale]
    integers = torch.quantize_per_tensor(x, qparams.scale, qparams.zero_point, torch.quint8)
    expected = fx.convert_fx(theirs)(integers)
    assert expected.dequantize().sub(reference(integers)).abs().max() <= 1.01 * qparams.scale
    assert 20 < sqnr(model(x), reference(integers)) < 50
    assert reference(integers).sub(lowered(integers)).abs().max() <= 1.01 * qparams.scale
