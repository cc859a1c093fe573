"""A module whose weight a parametrization computes is quantized; trained, it stays float with a warning."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import get_default_qat_qconfig_mapping, get_default_qconfig_mapping
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import torchq_compat as tc
from tests.helpers.oracle import activation_qparams, by_fx, by_us, fx_activation_qparams, sqnr
from tests.parity.fx_decisions import quantized_by_fx, quantized_by_us
from torchq_compat.errors import QuantizationWarning

MAPPING = get_default_qconfig_mapping("x86")


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def doubled(module: nn.Module, *names: str) -> nn.Module:
    for name in names:
        parametrize.register_parametrization(module, name, Doubled())
    return module


def convolutions() -> nn.Sequential:
    return nn.Sequential(weight_norm(nn.Conv1d(3, 4, 3)), nn.ReLU(), spectral_norm(nn.Conv1d(4, 4, 1))).eval()


class Tied(nn.Module):
    """Two modules of one parameter, which one of them uses as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.scaled = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scaled.weight = self.plain.weight
        doubled(self.scaled, "weight")

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(torch.relu(self.scaled(x)))


def make_plain(model: nn.Module) -> None:
    for module in list(model.modules()):
        for name, computed in list(getattr(module, "parametrizations", {}).items()):
            # remove_parametrizations writes into the originals, which may be another module's.
            for key, original in list(computed._parameters.items()):
                computed.register_parameter(key, nn.Parameter(original.detach().clone()))
            parametrize.remove_parametrizations(module, name)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolutions": (convolutions, (2, 3, 8)),
    "linear": (lambda: nn.Sequential(doubled(nn.Linear(8, 6), "weight", "bias")), (4, 8)),
    "linear relu": (lambda: nn.Sequential(weight_norm(nn.Linear(8, 6)), nn.ReLU()), (4, 8)),
    "batch norm": (lambda: nn.Sequential(spectral_norm(nn.Conv2d(3, 4, 3)), nn.BatchNorm2d(4)), (2, 3, 8, 8)),
    "tied": (Tied, (4, 8)),
}


@pytest.mark.parametrize(("make", "shape"), MODELS.values(), ids=MODELS)
def test_the_computed_weight_is_quantized_as_fx_does_without_the_parametrization(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    plain = make().eval()
    model = copy.deepcopy(plain)
    # Its class is shared with its copies.
    model_classes = {type(module) for module in model.modules()}
    batches = [(torch.randn(shape),) for _ in range(3)]
    state = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        expected = model(*batches[0])
    prepared, ours = by_us(model, MAPPING, batches)  # no warning, which would be an error
    assert {type(module) for module in model.modules()} == model_classes
    with torch.no_grad():
        assert torch.equal(model(*batches[0]), expected)
    make_plain(plain)
    fx_prepared, theirs = by_fx(plain, MAPPING, batches)
    assert quantized_by_us(prepared) == quantized_by_fx(fx_prepared)
    assert activation_qparams(ours) == fx_activation_qparams(theirs)
    assert sqnr(theirs(*batches[0]), ours(*batches[0])) > 60
    assert 25 < sqnr(expected, ours(*batches[0])) < 60
    told = {d.code for d in tc.explain(ours) if d.kind.startswith("parametrization of")}
    assert told == {"TQ331"}
    # The user's model is as it was.
    assert any(parametrize.is_parametrized(module) for module in model.modules())
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_fx_quantizes_the_weight_of_a_fused_module_only() -> None:
    _, theirs = by_fx(convolutions(), MAPPING, [(torch.randn(2, 3, 8),)])
    assert isinstance(theirs.get_submodule("0.0"), torch.ao.nn.quantized.reference.Conv1d)
    assert parametrize.is_parametrized(theirs.get_submodule("2"), "weight")
    make, shape = MODELS["batch norm"]
    with pytest.raises(KeyError, match="already exists"):
        by_fx(make().eval(), MAPPING, [(torch.randn(shape),)])


def test_trained_each_is_warned_about_with_the_way_out() -> None:
    model, x = convolutions().train(), torch.randn(2, 3, 8)
    # What spectral_norm estimates of a random weight may stand still from the start. For another weight, with
    # singular values so near to each other, it moves for dozens of steps, whatever is rounded.
    with torch.no_grad():
        model[2].parametrizations.weight.original.copy_(torch.tensor([1.0, 0.9, 0.8, 0.7]).diag()[..., None])
    with pytest.warns(QuantizationWarning) as caught:
        prepared = tc.prepare_qat_fx(model, get_default_qat_qconfig_mapping("x86"), (x,))
    texts = [str(w.message) for w in caught if issubclass(w.category, QuantizationWarning)]
    (told,) = [text for text in texts if "remove_parametrizations" in text]
    assert [part[-13:] for part in told.split(" stays float")[:2]] == ["Conv1d at '0'", "Conv1d at '2'"]
    assert told.count("Hint:") == 1
    for _ in range(2):  # spectral_norm keeps what it estimates for the next step
        before = prepared.get_buffer("2.parametrizations.weight.0._u").clone()
        prepared(x).sum().backward()
        assert not torch.equal(prepared.get_buffer("2.parametrizations.weight.0._u"), before)
    assert float(prepared.get_parameter("0.parametrizations.weight.original0").grad.abs().sum()) > 0  # type: ignore[union-attr]
    converted = tc.convert_to_reference_fx(prepared)
    assert not any("quantize_per_channel" in str(node.target) for node in converted.graph.nodes)


def test_the_way_out_quantizes() -> None:
    model, x = convolutions(), torch.randn(2, 3, 8)
    for index in (0, 2):
        parametrize.remove_parametrizations(model[index], "weight")
    model.train()
    prepared = tc.prepare_qat_fx(model, get_default_qat_qconfig_mapping("x86"), (x,))  # no warning
    prepared(x)
    converted = tc.convert_to_reference_fx(prepared)
    assert sum("dequantize_per_channel" in str(node.target) for node in converted.graph.nodes) == 2


def test_nothing_is_said_where_it_was_to_stay_float() -> None:
    mapping = get_default_qconfig_mapping("x86").set_module_name("0", None).set_module_name("2", None)
    prepared = tc.prepare_fx(convolutions(), mapping, (torch.randn(2, 3, 8),))
    assert {decision.action.value for decision in tc.explain(prepared).find("0")} == {"float"}


@pytest.mark.parametrize("place", [nn.Sequential, lambda lstm: lstm], ids=["nested", "root"])
@pytest.mark.parametrize("norm", [torch.nn.utils.weight_norm, weight_norm], ids=["hook", "parametrization"])
@pytest.mark.filterwarnings("ignore::torchq_compat.errors.QuantizationWarning")
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_a_recurrent_module_with_computed_weights_is_copied(norm: Any, place: Any) -> None:
    """Such weights have an autograd graph, which torch refuses to copy: as attributes and inside a list."""
    lstm = nn.LSTM(4, 5)
    for name in ("weight_ih_l0", "weight_hh_l0"):
        norm(lstm, name)
    model, x = place(lstm).eval(), torch.randn(6, 2, 4)
    model(x)
    prepared = tc.prepare_fx(model, MAPPING, (x,))
    prepared(x)
    again = copy.deepcopy(prepared)
    converted = copy.deepcopy(tc.convert_to_reference_fx(again))
    decisions = tc.explain(converted).find("0" if place is nn.Sequential else "module")
    assert "float" in [decision.action for decision in decisions]
    assert torch.equal(converted(x)[0], model(x)[0])


class _KeepsResults(nn.Module):
    """Keeps what it computed, as position tables and attention biases are kept between calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.table = nn.Parameter(torch.randn(2, 6))
        self.by_size: dict[int, Tensor] = {}
        self.kept = SimpleNamespace(last=[self.table])

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] not in self.by_size:
            self.by_size[x.shape[0]] = self.table[[0, 1, 0]]
        result: Tensor = self.linear(x) + self.by_size[x.shape[0]]
        self.kept.last.append(result)
        return result


def test_what_an_earlier_call_left_in_the_model_is_copied() -> None:
    """It has an autograd graph; in a dict or in an object it stopped prepare with torch's own error."""
    model, x = _KeepsResults().eval(), torch.randn(3, 6)
    expected = model(x)
    prepared = tc.prepare_fx(model, MAPPING, (x,))
    prepared(x)
    assert 30 < sqnr(expected, tc.convert_fx(prepared)(x)) < 60
    assert model.kept.last[1] is expected  # The user's model is as it was.
    assert model.by_size[3].requires_grad
