"""What a converted model loses on the last calibration batch is told at convert; what it keeps is not."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.nn import functional as F

import torchq_compat as tc
from torchq_compat.capture.trial_runs import sqnr
from torchq_compat.errors import QuantizationWarning

MAPPING = get_default_qconfig_mapping("x86")


class Difference(nn.Module):
    """A small difference of two values that are large, behind an attention, whose operator may draw."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        large = self.fc(F.scaled_dot_product_attention(x, x, x)) + 30000.0
        return large - 30000.0


@pytest.mark.parametrize("convert", [tc.convert_fx, tc.convert_to_reference_fx])
def test_what_is_lost_is_told_once(convert: object) -> None:
    assert callable(convert)
    x = torch.randn(64, 4)
    prepared = tc.prepare_fx(Difference().eval(), MAPPING, (x,))
    with torch.no_grad():
        expected = prepared(x)
    with pytest.warns(QuantizationWarning, match=r"dB from the prepared one .*\[TQ441\]$") as caught:
        converted = convert(prepared)
    assert [warning.message.code for warning in caught] == ["TQ441"]
    assert sqnr(expected, converted(x).detach()) < 1


def test_what_is_kept_is_not_told() -> None:
    x = torch.randn(64, 4)
    prepared = tc.prepare_fx(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), MAPPING, (x,))
    with torch.no_grad():
        expected = prepared(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error", QuantizationWarning)
        assert 20 < sqnr(expected, tc.convert_fx(prepared)(x).detach()) < 60
        x.zero_()  # a buffer that the loop over the data uses again
        tc.convert_fx(prepared)


def test_a_state_is_left_as_it_was() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.register_buffer("calls", torch.zeros(()))
            self.calls: Tensor
            self.register_buffer("mean", torch.zeros(4))  # needs a gradient once it was written to
            self.mean: Tensor

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            y = self.fc(x) * (2 * self.calls - 3)  # another sign at the second call
            self.mean.copy_(y.mean(0))
            return y

    x = torch.randn(8, 4)
    prepared = tc.prepare_fx(Counts().eval(), MAPPING, (x,))
    prepared(x)
    mean = prepared.mean.detach().clone()
    assert prepared.mean.requires_grad
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It is told that the second call's result is another one.
        converted = tc.convert_fx(prepared)
    assert float(converted.state_dict()["calls"]) == float(prepared.calls) == 1.0
    assert torch.equal(prepared.mean, mean)


def test_a_batch_that_has_a_gradient_is_no_part_of_a_copy() -> None:
    x = torch.randn(8, 4, requires_grad=True) * 2
    prepared = tc.prepare_fx(nn.Sequential(nn.Linear(4, 4)).eval(), MAPPING, (x.detach(),))
    prepared(x)
    copied = copy.deepcopy(prepared)
    assert torch.equal(tc.convert_fx(copied)(x), tc.convert_fx(prepared)(x))


def test_a_choice_that_leads_elsewhere_is_no_loss() -> None:
    class Greedy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score, self.table = nn.Linear(4, 500), nn.Embedding(500, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.table(self.score(x).argmax(-1))

    model, x = Greedy().eval(), torch.randn(64, 4)
    prepared = tc.prepare_fx(
        model, get_default_qconfig_mapping("x86").set_object_type(nn.Embedding, None), (x,)
    )
    prepared(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error", QuantizationWarning)
        assert sqnr(model(x).detach(), tc.convert_fx(prepared)(x).detach()) < 20
