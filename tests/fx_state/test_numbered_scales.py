"""Models in which FX's numbers are hard to assign, in every form of state, and how they are assigned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization import (
    QConfigMapping,
    default_dynamic_qconfig,
    float_qparams_weight_only_qconfig,
    get_default_qat_qconfig_mapping,
    get_default_qconfig_mapping,
)
from torch.ao.quantization.qconfig import float16_dynamic_qconfig

import torchq_compat as tc
from tests.fx_state import more_models as models
from tests.fx_state.pairs import differences_of, saved_from
from tests.helpers.oracle import activation_qparams, fx_activation_qparams, sqnr
from torchq_compat.checkpoints import load_fx_state
from torchq_compat.errors import CheckpointError
from torchq_compat.fx_state.numbered import Number, QuantizedValue, laid_beside

FORMS = ("prepared", "reference", "lowered")


def embeddings() -> QConfigMapping:
    return get_default_qconfig_mapping("x86").set_object_type(nn.Embedding, float_qparams_weight_only_qconfig)


def x86() -> QConfigMapping:
    return get_default_qconfig_mapping("x86")


def dynamic() -> QConfigMapping:
    return QConfigMapping().set_global(default_dynamic_qconfig)


def image() -> tuple[Any, ...]:
    return (torch.randn(2, 3, 16, 16),)


def tokens() -> tuple[Any, ...]:
    return (
        torch.randint(0, 30, (2, 7)),
        torch.arange(7).expand(2, 7).clone(),
        (torch.rand(2, 7) > 0.2).float(),
    )


def words() -> tuple[Any, ...]:
    return (torch.randint(0, 10, (2, 7)),)


def series() -> tuple[Any, ...]:
    return (torch.randn(2, 5, 6),)


def rows() -> tuple[Any, ...]:
    return (torch.randn(16, 8),)


Case = tuple[
    Callable[[], nn.Module], Callable[[], tuple[Any, ...]], Callable[[], QConfigMapping], tuple[str, ...]
]
#: The forms in which all scales are kept: FX keeps a single scale for all calls of a lowered module.
CASES: dict[str, Case] = {
    "patches": (models.Patches, image, x86, FORMS),
    "patches dynamic": (models.Patches, image, dynamic, FORMS),
    "tokens": (models.TokensAndMask, tokens, embeddings, FORMS),
    "repeated": (models.Repeated, image, x86, FORMS),
    "hidden": (models.Hidden, series, x86, FORMS),
    "shared": (models.Shared, rows, x86, FORMS[:2]),
    "tied": (models.Tied, words, x86, FORMS),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_equal_qparams_and_outputs(case: str) -> None:
    torch.manual_seed(0)
    make, batch, mapping, forms = CASES[case]
    saved = saved_from(make(), mapping, [batch() for _ in range(3)], lowered="lowered" in forms)
    assert {form: differences_of(saved, form) for form in forms} == {form: set() for form in forms}


def test_packed_weights_of_functions() -> None:
    torch.manual_seed(0)
    saved = saved_from(models.Functional(), x86, [image() for _ in range(3)])
    assert sum(name.startswith("_packed_weight_") for name in saved.states["lowered"]) == 3
    assert {form: differences_of(saved, form) for form in FORMS} == {form: set() for form in FORMS}


def test_weights_of_half_precision() -> None:
    torch.manual_seed(0)
    half = QConfigMapping().set_object_type(nn.Linear, float16_dynamic_qconfig)
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))
    saved = saved_from(model, lambda: half, [rows()])
    assert saved.states["lowered"]["0._packed_params.dtype"] is torch.float16
    assert {form: differences_of(saved, form) for form in FORMS} == {form: set() for form in FORMS}


def test_values_of_float_recurrent_modules() -> None:
    """FX names them after the code that unpacks the results, in whichever module that code is."""
    torch.manual_seed(0)
    saved = saved_from(models.Hidden(), x86, [series() for _ in range(2)])
    assert {form: differences_of(saved, form) for form in FORMS} == {form: set() for form in FORMS}


def test_one_scale_for_all_calls_of_a_lowered_module_is_told() -> None:
    torch.manual_seed(0)
    saved = saved_from(models.Shared(), x86, [rows() for _ in range(2)])
    with pytest.warns(UserWarning, match=r"one scale for all calls of a module: first\.scale"):
        load_fx_state(saved.prepared(), saved.states["lowered"])


class Activated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act, self.last = nn.Linear(4, 4), nn.ELU(), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.act(self.fc(x)))


def test_a_scale_that_fx_does_not_save_is_named() -> None:
    torch.manual_seed(0)
    saved = saved_from(Activated(), x86, [(torch.randn(8, 4),)])
    with pytest.raises(CheckpointError, match=r"lacks act.*outside of the state"):
        load_fx_state(saved.prepared(), saved.states["lowered"])
    assert differences_of(saved, "reference") == set()


class Dropped(nn.Module):
    """A model whose dropout and the op in front of it have no scale once lowered."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.drop, self.fc = nn.Conv2d(3, 4, 3), nn.Dropout(0.2), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.drop(self.conv(x).mean((2, 3))))


def test_dropout() -> None:
    """FX's lowered dropout has the qparams of its input, which here are those of the convolution."""
    torch.manual_seed(0)
    saved = saved_from(Dropped(), x86, [image() for _ in range(2)])
    assert differences_of(saved, "prepared") == set()
    assert differences_of(saved, "reference") == set()
    prepared, x = saved.prepared(), saved.batches[0]
    load_fx_state(prepared, saved.states["lowered"])
    converted = tc.convert_to_reference_fx(prepared)
    assert saved.lowered is not None
    assert activation_qparams(converted) < fx_activation_qparams(saved.reference)
    assert sqnr(saved.lowered(*x), converted(*x)) > 35


def test_a_weight_that_differs_from_itself_is_refused() -> None:
    torch.manual_seed(0)
    saved = saved_from(models.Tied(), x86, [words()])
    state = {**saved.states["prepared"], "words.weight": torch.zeros(10, 4)}
    with pytest.raises(CheckpointError, match=r"differ, and are one tensor"):
        load_fx_state(saved.prepared(), state)


def given(text: str) -> dict[int, Number]:
    """Return FX's numbers for ``text``: a letter for each number, equal for equal qparams; a dot where the
    state has none."""
    return {
        index: Number(letter in text[:index], index > 0 and text[index - 1] == letter)
        for index, letter in enumerate(text)
        if letter != "."
    }


def places(text: str, may_lack: str = "") -> list[QuantizedValue[int]]:
    """Return one place for each letter, equal letters for equal observers."""
    return [
        QuantizedValue(
            index, letter in may_lack, letter not in text[:index], index > 0 and text[index - 1] == letter
        )
        for index, letter in enumerate(text)
    ]


#: Letters of our observers, of FX's scales, of places that may lack a scale; and FX's numbers for each place.
LAYOUTS = {
    "the same": ("abc", "xyz", "", [{0}, {1}, {2}]),
    "an op more in FX": ("abc", "xxyz", "", [{0}, {2}, {3}]),
    "an op more in the middle": ("abbc", "xyyyz", "", [{0}, {1}, {2, 3}, {4}]),
    "lowered": ("abbc", "x...z", "b", [{0}, set(), set(), {4}]),
    "lowered with a module's": ("abc", ".y.", "ac", [set(), {1}, set()]),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_layouts(case: str) -> None:
    ours, theirs, may_lack, expected = LAYOUTS[case]
    laid = laid_beside(places(ours, may_lack), given(theirs), is_whole="." not in theirs)
    assert laid is not None
    assert [laid[0][index] for index in range(len(ours))] == expected


def test_a_parameter_is_where_its_qparams_are() -> None:
    """FX may have read the parameter in front of the ops whose results it meets."""
    for number in range(3):
        parameter = QuantizedValue(
            9, is_new=None, mismatch=lambda index, number=number: float(index != number)
        )
        laid = laid_beside([*places("ab"), parameter, *places("abc")[2:]], given("wxyz"), is_whole=True)
        assert laid is not None
        assert laid[0][9] == {number}
        assert [min(laid[0][index]) for index in range(3)] == [each for each in range(4) if each != number]


def test_there_may_be_no_way() -> None:
    assert laid_beside(places("abc"), given("xy"), is_whole=True) is None
    assert laid_beside(places("ab"), given("xyz"), is_whole=True) is None
    never = QuantizedValue(0, mismatch=lambda _: float("inf"))
    assert laid_beside([never], given("x"), is_whole=True) is None


def test_weights_of_a_module_under_two_names() -> None:
    torch.manual_seed(0)
    mapping = get_default_qat_qconfig_mapping("x86")
    saved = saved_from(models.Shared(), lambda: mapping, [rows() for _ in range(2)], is_qat=True)
    ours = saved.prepared()
    load_fx_state(ours, saved.states["prepared"])
    weights = {name: value for name, value in saved.states["prepared"].items() if name.endswith("weight")}
    found = dict(ours.named_parameters())
    assert torch.equal(found.get("first.weight", found.get("again.weight")), weights["first.weight"])
