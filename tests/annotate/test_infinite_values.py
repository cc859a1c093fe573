"""Masks of minus infinity, or of large negative numbers instead: the sum with a mask stays float."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig_mapping

import torchq_compat as tc
from tests.helpers.oracle import by_fx, calibrate, sqnr
from torchq_compat.annotate.extreme_values import extremes, stand_for_infinity
from torchq_compat.errors import QuantizationWarning

X86 = get_default_qconfig_mapping("x86")


class Attention(nn.Module):
    """One head, with a mask that is added to the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(-1, -2)
        return (scores + mask).softmax(-1) @ x


class Causal(Attention):
    """With a mask of later positions, made in ``forward``."""

    def __init__(self, infinity: float) -> None:
        super().__init__()
        self.infinity = infinity

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        size = x.shape[-2]
        return super().forward(x, torch.full((size, size), self.infinity).triu(1))


def example() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(4, 5, 8)


@pytest.mark.parametrize("infinity", [-torch.inf, -1e9, torch.finfo(torch.float32).min])
def test_a_mask_is_kept(infinity: float) -> None:
    x = example()
    model = Causal(infinity).eval()
    prepared = tc.prepare_fx(model, X86, (x,))
    calibrate(prepared, [(x,)])
    (added,) = tc.explain(prepared).find("add")
    assert added.action == "float"
    assert "stand for infinity" in added.reason
    lowered = tc.convert_fx(prepared)
    for converted in (lowered.reference, lowered):
        assert 25 < sqnr(model(x), converted(x)) < 60
    _, theirs = by_fx(model, X86, [(x,)])
    assert sqnr(model(x), theirs(x)) < 10


def test_a_mask_among_the_inputs_is_kept() -> None:
    x = example()
    model = Attention().eval()
    mask = torch.full((5, 5), -torch.inf).triu(1)
    prepared = tc.prepare_fx(model, X86, (x, mask))
    calibrate(prepared, [(x, mask)])
    assert 25 < sqnr(model(x, mask), tc.convert_fx(prepared)(x, mask)) < 60


def test_a_mask_that_the_example_does_not_show_is_told() -> None:
    x = example()
    model = Attention().eval()
    prepared = tc.prepare_fx(model, X86, (x, torch.zeros(5, 5)))
    calibrate(prepared, [(x, torch.full((5, 5), -torch.inf).triu(1))])
    with pytest.warns(QuantizationWarning) as caught:
        tc.convert_fx(prepared)
    # The scores that are cut off at the largest finite one are no longer masked.
    assert [warning.message.code for warning in caught] == ["TQ406", "TQ441"]  # type: ignore[union-attr]
    assert re.search("met infinite values.*add", str(caught[0].message))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, -torch.inf], True),
        ([-torch.inf, -torch.inf], True),
        ([1.0, -1e9], True),
        ([1e6, -1e9], False),
        ([1e9, 2e9], False),
        ([1e7, 0.0], False),
        ([0.0, torch.nan], False),
        ([], False),
    ],
)
def test_what_stands_for_infinity(values: list[float], expected: bool) -> None:
    assert stand_for_infinity(*extremes(torch.tensor(values))) is expected


def test_large_values_of_one_size_are_quantized() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 4)).eval(), 1e9 * torch.randn(16, 8)
    prepared = tc.prepare_fx(model, X86, (x,))
    calibrate(prepared, [(x,)])
    assert 25 < sqnr(model(x), tc.convert_fx(prepared)(x)) < 60
