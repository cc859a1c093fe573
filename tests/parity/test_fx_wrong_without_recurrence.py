"""Feed-forward models that FX converts to other values than it observed, beside what this package does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx as fx
from torch import Tensor, nn
from torch.ao.quantization import (
    PerChannelMinMaxObserver,
    QConfig,
    QConfigMapping,
    default_observer,
    get_default_qconfig,
    get_default_qconfig_mapping,
)
from torch.fx import GraphModule

import torchq_compat as tc
from tests.helpers.engines import with_exact_sums
from tests.helpers.oracle import sqnr


def prepare_both(model: nn.Module, mapping: QConfigMapping, x: Tensor) -> tuple[GraphModule, GraphModule]:
    """(by us, by FX), calibrated."""
    ours, theirs = tc.prepare_fx(model, mapping, (x,)), fx.prepare_fx(copy.deepcopy(model), mapping, (x,))
    for prepared in (ours, theirs):
        prepared(x)
    return ours, theirs


def test_prelu_on_the_integer_kernel_of_torch() -> None:
    """It quantizes the 1 of positive values with the weight's scale, which holds slopes: 1 saturates."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.PReLU(8), nn.Conv2d(8, 4, 3)).eval()
    x = torch.randn(16, 1, 9, 9)
    ours, theirs = prepare_both(model, get_default_qconfig_mapping("x86"), x)
    reference, exact = fx.convert_to_reference_fx(copy.deepcopy(theirs)), model(x)
    assert sqnr(exact, fx.convert_fx(theirs)(x)) < 10 < 25 < sqnr(exact, reference(x)) < 60
    assert sqnr(reference(x), tc.convert_fx(ours)(x)) > 50
    (told,) = (each.unlike_fx for each in tc.explain(ours) if each.path == "1")
    assert "largest slope" in told


class Joined(nn.Module):
    """Two convolutions, the second with larger results, joined before a third."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1), nn.Conv2d(8, 4, 1)
        with torch.no_grad():
            self.second.weight.mul_(8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.third(torch.cat([self.first(x), self.second(x)], 1))
        return result


def test_a_float_join_of_quantized_values() -> None:
    torch.manual_seed(0)
    model, x = Joined().eval(), torch.randn(2, 3, 8, 8)
    mapping = QConfigMapping().set_global(None).set_object_type(nn.Conv2d, get_default_qconfig("x86"))
    ours, theirs = prepare_both(model, mapping, x)
    reference, exact = fx.convert_to_reference_fx(copy.deepcopy(theirs)), model(x)
    assert sqnr(exact, fx.convert_fx(theirs)(x)) < 10 < 25 < sqnr(exact, reference(x)) < 60
    assert sqnr(reference(x), tc.convert_fx(ours)(x)) > 50
    (told,) = (each.unlike_fx for each in tc.explain(ours) if each.path == "third")
    assert "with those of the first" in told


def test_weights_in_a_range_narrower_than_the_dtype() -> None:
    """The scale of a symmetric observer in 4 bits is the largest value by 7.5, which rounds to 8."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 64)).eval(), torch.randn(32, 8)
    weight = PerChannelMinMaxObserver.with_args(
        dtype=torch.qint8, qscheme=torch.per_channel_symmetric, quant_min=-8, quant_max=7
    )
    mapping = QConfigMapping().set_global(QConfig(default_observer, weight))
    ours, theirs = prepare_both(model, mapping, x)
    (told,) = (each.unlike_fx for each in tc.explain(ours) if each.path == "0")
    assert told == "FX rounds its weights to -128 to 127, not to -8 to 7: the largest become 8"
    here, there = (
        tc.convert_fx(ours).get_submodule("0").weight(),
        fx.convert_fx(theirs).get_submodule("0").weight(),
    )
    torch.testing.assert_close(here.q_per_channel_scales(), there.q_per_channel_scales())
    assert int(there.int_repr().max()) == 8
    assert int(here.int_repr().max()) == 7
    assert torch.equal(here.int_repr(), there.int_repr().clamp(-8, 7))


class Gated(nn.Module):
    def __init__(self, gate: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.gate = nn.Linear(8, 8), nn.Linear(8, 8), gate

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x * self.gate(self.second(x))


@pytest.mark.parametrize(
    "gate", [torch.sigmoid, torch.tanh, nn.Hardsigmoid()], ids=["sigmoid", "tanh", "hard"]
)
def test_gates_without_fixed_qparams_have_the_scale_of_torchs_integer_kernel(gate: Any) -> None:
    """With one global QConfig; FX's reference quantizes with what was observed."""
    model, x = Gated(gate).eval(), torch.randn(256, 8)
    mapping = QConfigMapping().set_global(get_default_qconfig("fbgemm"))
    ours, theirs = prepare_both(model, mapping, x)
    reference = fx.convert_to_reference_fx(copy.deepcopy(theirs))(x)
    step = float(reference.max() - reference.min()) / 255
    assert float((tc.convert_fx(ours)(x) - reference).abs().max()) < 0.01 * step
    differing = (fx.convert_fx(theirs)(x) - reference).abs() > 0.5 * step
    assert 0.01 < float(differing.float().mean()) < 0.9
    (told,) = (each.unlike_fx for each in tc.explain(ours) if each.kind.startswith("mul"))
    assert "torch's integer kernel" in told


class Reshaped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.fc(x), 0).reshape(-1)


def test_a_result_behind_an_op_that_stays_float() -> None:
    """FX searches past the softmax for an observer, and finds the linear layer's."""
    model, x = Reshaped().eval(), torch.randn(256, 8)
    mapping = get_default_qconfig_mapping("fbgemm").set_object_type(torch.softmax, None)
    ours, theirs = prepare_both(model, mapping, x)
    exact, found = model(x), fx.convert_to_reference_fx(theirs)(x)
    assert sqnr(exact, found) + 10 < sqnr(exact, tc.convert_fx(ours)(x)) < 60
    (told,) = (each.unlike_fx for each in tc.explain(ours) if each.kind.startswith("reshape"))
    assert "FX quantizes its result with the qparams of another tensor" in told


class Bounded(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.between = nn.Linear(8, 8), between

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.between(self.fc(x) * 3))


@pytest.mark.parametrize(
    ("between", "cut"),
    [
        (lambda y: y.chunk(2, 1)[0], True),
        (lambda y: y[:, :4], True),
        (torch.neg, True),
        (torch.relu, False),
        (lambda y: y.view(-1, 4).transpose(0, 1), False),
        (nn.Dropout(), False),
    ],
    ids=["chunk", "slice", "neg", "relu", "view", "dropout"],
)
def test_inputs_of_a_tanh_that_fx_cuts_are_told(between: Callable[[Tensor], Tensor], cut: bool) -> None:
    model, x = Bounded(between).eval(), torch.randn(256, 8)
    ours, theirs = prepare_both(model, get_default_qconfig_mapping("x86"), x)
    exact, found = model(x), tc.convert_to_reference_fx(ours)(x)
    by_theirs = fx.convert_to_reference_fx(theirs)(x)
    assert 15 < sqnr(exact, found) < 45
    assert (sqnr(exact, by_theirs) + 4 < sqnr(exact, found)) is cut
    assert (sqnr(by_theirs, found) > 40) is not cut
    (told,) = (each.unlike_fx for each in tc.explain(ours) if each.kind.startswith("tanh"))
    assert told == (
        cut * "FX quantizes its input with the qparams of its own result, which cuts what is beyond"
    )


class Concatenated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.relu6 = nn.Linear(8, 8), nn.Linear(8, 8), nn.ReLU6()

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.first(x) * 4, self.relu6(self.second(x))], 1)


def test_a_join_with_what_fx_runs_on_integers() -> None:
    """FX's lowering runs relu6 with the qparams of its input, and the join takes it to have its own."""
    model, x = Concatenated().eval(), torch.randn(256, 8)
    ours, theirs = prepare_both(model, get_default_qconfig_mapping("x86"), x)
    reference = fx.convert_to_reference_fx(copy.deepcopy(theirs))(x)
    found = tc.convert_fx(ours)(x)
    assert sqnr(reference, found) > 40
    assert sqnr(reference, fx.convert_fx(theirs)(x)) + 6 < sqnr(reference, found)
    (told,) = (each.unlike_fx for each in tc.explain(ours) if each.kind.startswith("cat"))
    assert "joins the integers before it, although they have different qparams" in told


class BehindGate(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.between = nn.Linear(6, 8), nn.Linear(8, 4), between

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.between(self.first(x)))
        return result


#: What FX's reference cuts to the fixed qparams of the sigmoid or tanh, and its kernel does not.
WITH_NUMBERS: list[Callable[[Tensor], Tensor]] = [
    lambda x: torch.sigmoid(x) * -8,
    lambda x: (2 * torch.sigmoid(x) - 1).view(-1, 2, 4).flatten(1),
    lambda x: torch.relu(torch.tanh(x) + 0.5) * 3,
]
JOINED: list[Callable[[Tensor], Tensor]] = [
    lambda x: torch.cat([torch.tanh(x), x * 3], 1)[:, 4:12],
    lambda x: torch.stack([torch.sigmoid(x), x]).sum(0),
]


def test_what_computes_with_a_number_keeps_the_integers_of_a_gate() -> None:
    for between in WITH_NUMBERS:
        torch.manual_seed(0)
        model, x = BehindGate(between).eval(), torch.randn(64, 6)
        ours, theirs = prepare_both(model, get_default_qconfig_mapping("x86"), x)
        reference, exact = fx.convert_to_reference_fx(copy.deepcopy(theirs)), model(x)
        lowered, converted = with_exact_sums(fx.convert_fx(theirs))(x), tc.convert_fx(ours)(x)
        assert sqnr(exact, reference(x)) < 15 < 28 < sqnr(exact, converted) < 60
        assert sqnr(lowered, converted) > 30


def test_a_join_that_begins_with_a_gate_has_an_observer_of_its_own() -> None:
    for between in JOINED:
        torch.manual_seed(0)
        model, x = BehindGate(between).eval(), torch.randn(64, 6)
        ours, theirs = prepare_both(model, get_default_qconfig_mapping("x86"), x)
        exact, converted = model(x), tc.convert_fx(ours)(x)
        assert sqnr(exact, fx.convert_fx(theirs)(x)) < 15 < 22 < sqnr(exact, converted) < 60
        assert any("another tensor" in (each.unlike_fx or "") for each in tc.explain(ours))
