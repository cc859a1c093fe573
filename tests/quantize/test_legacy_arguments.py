"""Example inputs and keywords in the forms that FX accepted without a check."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import DeQuantStub, QuantStub, get_default_qconfig_mapping
from torch.ao.quantization.fx.custom_config import PrepareCustomConfig
from torch.utils.data import DataLoader

import torchq_compat as tc
from torchq_compat.errors import ArgumentError, InputError, QuantizationWarning
from torchq_compat.quantize.first_call import at_once

MAPPING = get_default_qconfig_mapping("x86")


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        y = self.fc(x)
        return y if shift is None else y + shift


class OfDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.fc(batch["image"])


X, SHIFT = torch.randn(3, 4), torch.randn(2)


@pytest.mark.parametrize(
    ("model", "given", "called", "told"),
    [
        (Two(), X, (X,), r"a single Tensor, taken as the only argument; write \(x,\)"),
        (Two(), [X, SHIFT], (X, SHIFT), r"a list, taken as the tuple .* write tuple"),
        (Two(), {"shift": SHIFT, "x": X}, (X, SHIFT), r"write a tuple of \(x, shift\)"),
        (Two(), {"x": X}, (X,), r"write a tuple of \(x\)"),
        (OfDict(), {"image": X}, ({"image": X},), "a single dict"),
    ],
)
def test_taken_with_a_warning(model: nn.Module, given: Any, called: tuple[Any, ...], told: str) -> None:
    model.eval()
    with pytest.warns(QuantizationWarning, match=told):
        prepared = tc.prepare_fx(model, MAPPING, given)
    assert torch.equal(prepared(*called), model(*called))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (None, r"None stands in its place.*\n.*first batch of the calibration loader"),
        ({"preserved_attributes": ["a"]}, "stands in the place of example_inputs"),
        ({}, "stands in the place of example_inputs"),
        (PrepareCustomConfig(), "stands in the place of example_inputs"),
        (DataLoader([1]), "must be a tuple of positional arguments, got DataLoader"),
        ((X, SHIFT, X), r"takes 2 positional arguments, and they are 3.\n.*targets"),
        ((1, 3, 8), r"takes 2 positional arguments, and they are 3 numbers.\n.*torch.rand\(shape\)"),
        ({"x": X, "target": X}, "a dict with 'target', which Two.forward does not take"),
        ({"shift": SHIFT}, "a dict without 'x', which Two.forward needs"),
    ],
)
def test_refused_in_a_sentence(given: Any, told: str) -> None:
    with pytest.raises(InputError, match=told):
        at_once(tc.prepare_fx)(Two().eval(), MAPPING, given)


def test_old_keywords() -> None:
    with pytest.warns(QuantizationWarning) as told:
        prepared = tc.prepare_fx(
            Two().eval(), qconfig_dict=MAPPING, example_inputs=(X,), prepare_custom_config_dict={}
        )
    ours = [str(each.message) for each in told if issubclass(each.category, QuantizationWarning)]
    assert [message.split(";")[1].partition(" Hint: ")[0] for message in ours] == [
        " write qconfig_mapping=.",
        " write prepare_custom_config=.",
    ]
    assert all(message.endswith(" [TQ301]") for message in ours)
    prepared(X)
    for arguments, keywords in (((), {"is_reference": True}), ((True,), {})):
        with pytest.warns(QuantizationWarning, match="write convert_to_reference_fx"):
            reference = tc.convert_fx(prepared, *arguments, **keywords)
        assert torch.equal(reference(X), tc.convert_to_reference_fx(prepared)(X))
    with pytest.warns(QuantizationWarning, match="leave it out"):
        tc.convert_fx(prepared, is_reference=False)
    with pytest.warns(QuantizationWarning), pytest.raises(ArgumentError, match="twice"):
        tc.prepare_fx(Two().eval(), MAPPING, (X,), qconfig_dict=MAPPING, qconfig_mapping=MAPPING)


def test_quant_stubs_do_nothing() -> None:
    class Stubs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant = QuantStub(), DeQuantStub()
            self.fc = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.dequant(self.fc(self.quant(x)))

    with_stubs, without = Stubs().eval(), Two().eval()
    without.fc.load_state_dict(with_stubs.fc.state_dict())
    results = []
    for model in (with_stubs, without):
        prepared = tc.prepare_fx(model, MAPPING, (X,))
        prepared(X)
        converted = tc.convert_fx(prepared)
        results.append(converted(X))
        assert converted.fc.weight().dtype is torch.qint8
    assert torch.equal(*results)
    assert not torch.equal(results[0], with_stubs(X))
