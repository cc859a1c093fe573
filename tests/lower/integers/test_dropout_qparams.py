"""Behind a dropout, or a product with a number, a lowered model has the integers before it, as FX's has."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.ao.quantization.quantize_fx as fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig_mapping

import torchq_compat as tc
from tests.helpers.oracle import sqnr
from torchq_compat.lower.integers.qdq_graph import hand_on_qparams
from torchq_compat.read.qdq import DEQUANTIZE, QUANTIZE


class Head(nn.Module):
    """As of MobileNetV2: a mean, whose range is a part of that of what it averages, a dropout, a linear."""

    def __init__(self, drop: Callable[[Tensor], Tensor] | nn.Module, *, flat: bool = False) -> None:
        super().__init__()
        self.conv, self.side = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1)
        self.pool, self.flat, self.drop, self.fc = nn.AdaptiveAvgPool2d(2), flat, drop, nn.Linear(32, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        x = self.pool(x + self.side(x))
        x = torch.flatten(self.drop(x), 1) if self.flat else self.drop(torch.flatten(x, 1))
        result: Tensor = self.fc(x)
        return result


def functional(x: Tensor) -> Tensor:
    return F.dropout(x, 0.3, training=False)


@pytest.mark.parametrize("flat", [False, True], ids=["flattened before", "flattened behind"])
@pytest.mark.parametrize("drop", [nn.Dropout(0.2), functional], ids=["module", "function"])
def test_integers_pass_a_dropout_as_in_fx(drop: Callable[[Tensor], Tensor], flat: bool) -> None:
    torch.manual_seed(0)
    model, x, mapping = (
        Head(drop, flat=flat).eval(),
        torch.randn(64, 3, 8, 8),
        get_default_qconfig_mapping("x86"),
    )
    theirs = fx.prepare_fx(copy.deepcopy(model), mapping, (x,))
    ours = tc.prepare_fx(model, mapping, (x,))
    theirs(x), ours(x)
    lowered, reference, expected = (
        tc.convert_fx(ours),
        tc.convert_to_reference_fx(ours),
        fx.convert_fx(theirs)(x),
    )
    # A rounding tie may fall on the other step; requantized, most rows differ.
    assert sqnr(expected, lowered(x)) > 60 > 50 > sqnr(expected, reference(x)) > 25
    targets = [str(node.target) for node in lowered.graph.nodes]
    # The input, and the averages, which are computed in floats.
    assert targets.count("torchq_compat_native.quantize.default") == 2
    assert not any("lookup" in target for target in targets)


@pytest.mark.parametrize(("dtype", "high"), [(torch.uint8, 255), (torch.uint8, 127), (torch.int16, 255)])
def test_another_range_behind_a_dropout_is_quantized_again(dtype: torch.dtype, high: int) -> None:
    graph = torch.fx.Graph()
    value = graph.placeholder("x")
    for args in ((0.5, 3, 0, 255, torch.uint8), (0.1, 7, 0, high, dtype)):
        integers = graph.call_function(QUANTIZE, (value, *args))
        floats = graph.call_function(DEQUANTIZE, (integers, *args))
        value = graph.call_function(torch.ops.aten.dropout.default, (floats, 0.5, False))
    graph.output(value)
    model = torch.fx.GraphModule(nn.Module(), graph)
    for node in graph.nodes:
        node.meta["val"] = torch.zeros(2)
    hand_on_qparams(model)
    is_same = (dtype, high) == (torch.uint8, 255)
    last = [node for node in graph.nodes if node.target in (QUANTIZE, DEQUANTIZE)][2:]
    assert [node.args[1:3] for node in last] == [(0.5, 3) if is_same else (0.1, 7)] * 2


class Scaled(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.between = nn.Linear(16, 16), nn.Linear(16, 16), between

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.between(self.first(x)))
        return result


PRODUCTS: list[Callable[[Tensor], Tensor]] = [
    lambda x: 1.9 * x * 0.5 * 1.9 * 0.5,
    lambda x: torch.relu(x * 30).view(-1, 16) * 0.01,
    lambda x: torch.clamp(x * -0.25, -0.2, 0.3) * -4,
]


def test_products_with_numbers_keep_their_integers_as_in_fx() -> None:
    for between in PRODUCTS:
        torch.manual_seed(0)
        model, x, mapping = Scaled(between).eval(), torch.randn(256, 16), get_default_qconfig_mapping("x86")
        theirs, ours = fx.prepare_fx(copy.deepcopy(model), mapping, (x,)), tc.prepare_fx(model, mapping, (x,))
        theirs(x), ours(x)
        lowered, reference = tc.convert_fx(ours)(x), tc.convert_to_reference_fx(ours)(x)
        exact, again = model(x), fx.convert_to_reference_fx(copy.deepcopy(theirs))(x)
        assert sqnr(fx.convert_fx(theirs)(x), lowered) > 60
        assert abs(sqnr(exact, again) - sqnr(exact, reference)) < 2
        assert sqnr(exact, reference) + 4 < sqnr(exact, lowered) < 40


def test_what_no_scale_can_be_multiplied_with_is_quantized_again() -> None:
    for number in (0, 1e-60, float("inf")):
        torch.manual_seed(0)
        model, x = (
            Scaled(lambda x, number=number: (x * number).nan_to_num(0.5, 1.0, -1.0)).eval(),
            torch.randn(8, 16),
        )  # type: ignore[misc]
        ours = tc.prepare_fx(model, get_default_qconfig_mapping("x86"), (x,))
        ours(x)
        assert tc.convert_fx(ours)(x).isfinite().all()


def test_a_product_by_a_method_is_one_by_an_operator() -> None:
    """FX's BackendConfig has no methods, and torch.export writes the same node for both (TQ580)."""
    forms: list[Callable[[Tensor], Tensor]] = [lambda x: x * 3.7, lambda x: x.mul(3.7)]
    decibels = []
    for between in forms:
        torch.manual_seed(0)
        model, x, mapping = Scaled(between).eval(), torch.randn(64, 16), get_default_qconfig_mapping("x86")
        theirs, ours = fx.prepare_fx(copy.deepcopy(model), mapping, (x,)), tc.prepare_fx(model, mapping, (x,))
        theirs(x), ours(x)
        decibels += [sqnr(model(x), fx.convert_fx(theirs)(x)), sqnr(model(x), tc.convert_fx(ours)(x))]
    assert abs(decibels[0] - decibels[1]) < 0.5
    assert abs(decibels[1] - decibels[3]) < 0.01
    assert 2 < decibels[2] - decibels[3] < 8
    ours = tc.prepare_fx(model, mapping.set_object_type("mul", None), (x,))
    ours(x)
    assert abs(sqnr(model(x), tc.convert_fx(ours)(x)) - decibels[2]) < 0.5
