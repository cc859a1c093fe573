"""Ops that train on purpose compute in every mode what they compute in the float model in evaluation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import get_default_qat_qconfig_mapping, get_default_qconfig_mapping

import torchq_compat as tc
from tests.helpers.oracle import by_fx, calibrate, sqnr


class AlwaysDrops(nn.Dropout):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.p, training=True)


class NeverEvaluates(nn.Dropout):
    def train(self, mode: bool = True) -> Any:
        return super().train(True)


class Dropping(nn.Module):
    def __init__(self, drop: nn.Module) -> None:
        super().__init__()
        self.fc, self.drop, self.head = nn.Linear(8, 16), drop, nn.Linear(16, 4)
        self.usual = nn.Dropout(0.9)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.usual(self.drop(F.relu(self.fc(x)))))


DROPS = [AlwaysDrops(), NeverEvaluates(), nn.Dropout()]
QAT = get_default_qat_qconfig_mapping("x86")


def set_apart(model: nn.Module) -> nn.Module:
    model.eval()
    model.get_submodule("drop").train()
    return model


def draws(model: nn.Module, x: Tensor) -> bool:
    with torch.no_grad():
        return not torch.equal(model(x), model(x))


@pytest.mark.parametrize("is_qat", [False, True], ids=["ptq", "qat"])
@pytest.mark.parametrize(
    "drop", [AlwaysDrops(), NeverEvaluates(), nn.Dropout()], ids=lambda d: type(d).__name__
)
def test_monte_carlo_dropout_draws_in_every_mode(drop: nn.Module, is_qat: bool) -> None:
    torch.manual_seed(0)
    x, usual = torch.randn(16, 8), type(drop) is nn.Dropout
    model = Dropping(copy.deepcopy(drop)).eval()
    if usual and not is_qat:
        set_apart(model)
    if is_qat:
        prepared = tc.prepare_qat_fx(
            copy.deepcopy(model).train(), get_default_qat_qconfig_mapping("x86"), (x,)
        )
    else:
        prepared = tc.prepare_fx(model, get_default_qconfig_mapping("x86"), (x,))
    prepared.eval()
    calibrate(prepared, [(x,)] * 2)
    expected = not usual or not is_qat
    for converted in (tc.convert_to_reference_fx(prepared), tc.convert_fx(prepared)):
        assert draws(converted, x) is expected
        assert draws(copy.deepcopy(converted).train(), x)
        assert draws(converted.train().eval(), x) is expected


def test_a_dropout_set_apart_is_explained() -> None:
    model = set_apart(Dropping(nn.Dropout()))
    prepared = tc.prepare_fx(model, get_default_qconfig_mapping("x86"), (torch.randn(2, 8),))
    assert [d.kind for d in tc.explain(prepared) if "set apart" in d.reason] == ["training mode of Dropout"]


class StandardizedConv(nn.Conv2d):
    """The convolution of NF-Nets and BiT."""

    def forward(self, x: Tensor) -> Tensor:
        flat = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(flat, None, None, training=True, momentum=0.0).reshape_as(self.weight)
        return F.conv2d(x, weight, self.bias)


class Normalizing(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        make = StandardizedConv if kind == "weights" else nn.Conv2d
        self.conv, self.head, self.kind = make(3, 8, 3), make(8, 8, 3), kind
        self.norm: nn.Module = nn.Identity()
        if kind == "no statistics":
            self.norm = nn.BatchNorm2d(8, track_running_stats=False)
        if kind == "instance":
            self.norm = nn.InstanceNorm2d(8, affine=True, track_running_stats=True)
            self.norm.running_mean.fill_(0.3)
        if kind == "no momentum":
            self.norm = nn.BatchNorm2d(8, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x))
        if self.kind == "function":
            x = F.batch_norm(x, None, None, training=True)
        return self.head(F.relu(x))


KINDS = ["function", "no statistics", "weights", "instance", "no momentum"]


class OfAllKinds(nn.Module):
    """One model of each kind, with nothing but their input in common."""

    def __init__(self) -> None:
        super().__init__()
        self.models = nn.ModuleDict({kind: Normalizing(kind) for kind in KINDS})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {kind: model(x) for kind, model in self.models.items()}


@pytest.mark.parametrize("is_qat", [False, True], ids=["ptq", "qat"])
def test_norms_mean_what_they_meant(is_qat: bool, subtests: pytest.Subtests) -> None:
    torch.manual_seed(0)
    model, x = OfAllKinds().eval(), torch.randn(4, 3, 10, 10)
    with torch.no_grad():
        floats = model(x)
    if is_qat:
        prepared = tc.prepare_qat_fx(copy.deepcopy(model).train(), QAT, (x,))
    else:
        prepared = tc.prepare_fx(model, get_default_qconfig_mapping("x86"), (x,))
    prepared.eval()
    observed = copy.deepcopy(prepared)
    for module in observed.modules():
        if hasattr(module, "disable_fake_quant"):
            module.disable_fake_quant()
    calibrate(prepared, [(x,)] * 2)
    reference, lowered = tc.convert_to_reference_fx(prepared), tc.convert_fx(prepared)
    with torch.no_grad():
        results = [floats, *(form(x) for form in (observed, reference, lowered.train().eval()))]
    for kind in KINDS:
        with subtests.test(kind=kind):
            expected, as_observed, as_reference, as_lowered = (each[kind] for each in results)
            assert sqnr(expected, as_observed) > 100
            found = sqnr(expected, as_reference)
            assert 22 < found < 45
            assert abs(sqnr(expected, as_lowered) - found) < 1
            if not is_qat and kind != "no statistics":  # FX asserts running statistics
                alone = model.models[kind]
                _, oracle = by_fx(alone, get_default_qconfig_mapping("x86"), [(x,)] * 2)
                assert abs(found - sqnr(expected, oracle(x))) < 1


class OnlyTrains(Dropping):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            raise ValueError("no running statistics yet")
        return super().forward(x)


def test_a_model_that_does_not_evaluate_is_warned_about_with_its_error() -> None:
    x, model = torch.randn(16, 8), OnlyTrains(AlwaysDrops()).train()
    with pytest.warns(tc.errors.QuantizationWarning, match=r"ValueError: no running statistics yet"):
        prepared = tc.prepare_qat_fx(model, QAT, (x,))
    (said,) = [d for d in tc.explain(prepared).decisions if d.kind == "evaluation mode of OnlyTrains"]
    assert (said.action.value, said.path) == ("dropped", "")
    assert draws(prepared.train(), x)
