"""Scripts that replace or remove observers of a prepared model before they convert it, beside live FX."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx as fx
from torch import Tensor, nn
from torch.ao.quantization import (
    FakeQuantize,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    ObserverBase,
    PlaceholderObserver,
    get_default_qat_qconfig_mapping,
    get_default_qconfig_mapping,
)
from torch.fx import GraphModule

import torchq_compat as tc
from tests.helpers.oracle import sqnr
from torchq_compat.errors import QuantizationWarning
from torchq_compat.support.decisions import Action

COARSE = MinMaxObserver.with_args(dtype=torch.quint8, quant_min=0, quant_max=15)
WEIGHTS = "observers of weights were replaced after prepare"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu, self.fc = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Linear(288, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc(self.relu(self.conv(x)).flatten(1))
        return result


class Largest(ObserverBase):
    """A user's own observer."""

    quant_min, quant_max, qscheme = 0, 255, torch.per_tensor_affine

    def __init__(self) -> None:
        super().__init__(dtype=torch.quint8)
        self.largest = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.largest = max(self.largest, float(x.abs().max()))
        return x

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        return torch.tensor([2 * self.largest / 255]), torch.tensor([128])

    with_args = classmethod(functools.partial)


def observers(prepared: GraphModule) -> list[Any]:
    return [n for n in prepared.graph.nodes if "activation_post_process" in str(n.target)]


def replace_all(prepared: GraphModule, make: Callable[[], nn.Module]) -> None:
    for node in observers(prepared):
        setattr(prepared, node.target, make())


def quantized(engine: Any, edit: Callable[[GraphModule], None], *, is_qat: bool = False) -> GraphModule:
    """Return the reference model of an engine, edited between prepare and calibration."""
    torch.manual_seed(0)
    model, x = Net().train(is_qat), torch.randn(32, 3, 8, 8)
    with warnings.catch_warnings():
        if engine is fx:
            warnings.simplefilter("ignore")
        if is_qat:
            prepared = engine.prepare_qat_fx(model, get_default_qat_qconfig_mapping("qnnpack"), (x,))
        else:
            prepared = engine.prepare_fx(model, get_default_qconfig_mapping("x86"), (x,))
        edit(prepared)
        with torch.no_grad():
            prepared(x)
        converted: GraphModule = engine.convert_to_reference_fx(prepared.eval())
    return converted


@pytest.mark.parametrize(
    "make", [COARSE, MovingAverageMinMaxObserver, Largest], ids=["4 bits", "moving average", "own"]
)
def test_replaced_observers_quantize(make: Callable[[], nn.Module]) -> None:
    with pytest.warns(QuantizationWarning, match=WEIGHTS):
        ours = quantized(tc, lambda prepared: replace_all(prepared, make))
    theirs, x = quantized(fx, lambda prepared: replace_all(prepared, make)), torch.randn(16, 3, 8, 8)
    assert sqnr(theirs(x), ours(x)) > 60
    torch.manual_seed(0)
    assert sqnr(Net()(x), ours(x)) < 50
    assert {d.action for d in tc.explain(ours) if d.kind.startswith(("Conv", "Linear"))} == {Action.QUANTIZED}


def test_one_observer_replaced_by_name() -> None:
    def edit(prepared: GraphModule) -> None:
        (target,) = {n.target for n in observers(prepared) if n.args[0].op == "placeholder"}
        setattr(prepared, target, COARSE())

    theirs, ours, x = quantized(fx, edit), quantized(tc, edit), torch.randn(16, 3, 8, 8)
    assert sqnr(theirs(x), ours(x)) > 60
    assert ours.input_qparams() == (None,)
    scales = [n.args[1] for n in ours.graph.nodes if n.name.startswith("quantize_per_tensor")]
    assert scales[0] > 10 * min(scales)


def test_an_observer_without_qparams_is_refused() -> None:
    placeholder = PlaceholderObserver.with_args(dtype=torch.quint8)
    with (
        pytest.warns(QuantizationWarning, match=WEIGHTS),
        pytest.raises(tc.TorchQCompatError, match="compute no scale and zero point"),
    ):
        quantized(tc, lambda prepared: replace_all(prepared, placeholder))


def remove(prepared: GraphModule, keep: Callable[[Any], bool] = lambda node: False) -> None:
    for node in observers(prepared):
        if not keep(node):
            node.replace_all_uses_with(node.args[0])
            prepared.graph.erase_node(node)
    prepared.recompile()


def test_identities_leave_activations_float_and_weights_quantized() -> None:
    def edit(prepared: GraphModule) -> None:
        replace_all(prepared, nn.Identity)

    with pytest.warns(QuantizationWarning) as told:
        ours = quantized(tc, edit)
    assert any("observers of prepare are gone from the graph" in str(each.message) for each in told)
    x = torch.randn(16, 3, 8, 8)
    assert sqnr(quantized(fx, edit)(x), ours(x)) > 60


def test_erased_observers_are_told() -> None:
    with pytest.warns(QuantizationWarning, match=r"observers of prepare are gone .* stays float"):
        ours = quantized(tc, remove)
    decided = {d.path: d for d in tc.explain(ours)}
    assert decided["conv"].action is decided["fc"].action is Action.FLOAT
    assert "removed from the prepared model" in decided["conv"].reason
    with pytest.warns(QuantizationWarning, match="1 observers of prepare are gone"):
        ours = quantized(tc, lambda prepared: remove(prepared, lambda n: n.args[0].op != "placeholder"))
    decision = tc.explain(ours).find("conv")[0]
    assert decision.action is Action.QUANTIZED
    assert "removed from the prepared model" in decision.reason


def test_a_fake_quantize_of_a_weight_is_replaced_at_its_module() -> None:
    four_bits = FakeQuantize.with_args(
        observer=MinMaxObserver,
        dtype=torch.qint8,
        quant_min=-8,
        quant_max=7,
        qscheme=torch.per_tensor_symmetric,
    )

    def edit(prepared: GraphModule) -> None:
        made = four_bits()
        prepared.fc.weight_fake_quant = made  # type: ignore[union-attr, assignment]
        assert prepared.fc.weight_fake_quant is made  # type: ignore[union-attr]

    theirs, ours = quantized(fx, edit, is_qat=True), quantized(tc, edit, is_qat=True)
    x = torch.randn(16, 3, 8, 8)
    plain = quantized(tc, lambda prepared: None, is_qat=True)
    assert sqnr(theirs(x), ours(x)) > 35 > sqnr(theirs(x), plain(x))


def test_activations_fake_quantizes_on_trained_weights_are_told() -> None:
    """In FX a loop over the names ``activation_post_process_N`` meets activations only."""
    activation = FakeQuantize.with_args(observer=MovingAverageMinMaxObserver, dtype=torch.quint8)

    def by_name(prepared: GraphModule) -> None:
        for name, _ in list(prepared.named_children()):
            if name.startswith("activation_post_process"):
                setattr(prepared, name, activation())

    with pytest.warns(QuantizationWarning, match="of weights were replaced by those of activations"):
        quantized(tc, by_name, is_qat=True)
