"""What Python decides by sizes inside the model is a rule in every form of the model, told in numbers."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import QConfigMapping, get_default_qconfig_mapping
from torch.export import Dim

import torchq_compat as tc
from tests.helpers.oracle import calibrate
from torchq_compat.errors import InputError, QuantizationWarning


class Windows(nn.Module):
    """Decides by the length behind a convolution, and pads to windows without deciding anything."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv1d(3, 4, 2, 2), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        y = y * 2 if y.size(2) > 4 else y - 1
        y = F.pad(y, (0, -y.size(2) % 3))
        return self.fc(y.transpose(1, 2)).sum(1) / y.size(2)


class Decides(nn.Module):
    def __init__(self, condition: str) -> None:
        super().__init__()
        self.conv, self.condition = nn.Conv1d(3, 3, 2, 2), condition

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return y * 2 if eval(self.condition, {"n": y.size(2), "b": y.size(0)}) else y - 1


def quietly(model: nn.Module, example: Tensor, mapping: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", QuantizationWarning)
        return tc.prepare_fx(model.eval(), mapping, (example,))


@pytest.mark.parametrize(
    ("condition", "expected", "right", "wrong"),
    [
        ("n > 4", "at least 10", 23, 9),
        ("n < 12", "2 to 23", 2, 24),
        ("4 < n < 12", "10 to 23", 23, 24),
        ("n == 8", "16 to 17", 17, 18),
        ("n % 2 == 0", "16 to 17, 20 to 21 and so on", 21, 18),
        ("n % 2 == 0 and n > 1", "16 to 17, 20 to 21 and so on", 16, 19),
    ],
)
def test_rules_are_told_in_numbers(condition: str, expected: str, right: int, wrong: int) -> None:
    model = Decides(condition)
    prepared = quietly(model, torch.randn(2, 3, 16), QConfigMapping())
    x = torch.randn(5, 3, right)
    torch.testing.assert_close(prepared(x), model(x))
    message = rf"'x' has size {wrong} in dimension 2, .* needs {expected}, because of .*eval"
    with pytest.raises(InputError, match=message):
        prepared(torch.randn(2, 3, wrong))
    told = [d for d in tc.explain(prepared).decisions if expected in d.reason]
    assert [d.kind for d in told] == ["dimension 2"]


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("(8 - n % 8) % 8 <= 0", "a multiple of 8"),
        ("not n % 4", "a multiple of 4"),
        ("n > 3 and n * 2 > 10", "at least 6"),
        ("n // 2 == 8", "16 to 17"),
        ("-(-n // -(-n // 4)) == 4", "4, 7, 8 or at least 10"),
        ("n != 5", r"x.size\(1\) != 5"),
    ],
)
def test_rules_about_a_size_of_an_input_are_told_in_numbers(condition: str, expected: str) -> None:
    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if eval(condition, {"n": x.size(1)}) else x - 1

    prepared = quietly(Asks(), torch.randn(2, 16), QConfigMapping())
    with pytest.raises(InputError, match=rf"size 5 in dimension 1, .* needs {expected}, because of"):
        prepared(torch.randn(2, 5))
    assert torch.equal(prepared(torch.ones(3, 16)), torch.full((3, 16), 2.0))


def test_a_multiple_of_a_number_is_told_as_one() -> None:
    class Even(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            return y + 1 if y.size(1) % 4 == 0 else y

    prepared = quietly(Even(), torch.randn(2, 8), QConfigMapping())
    assert torch.equal(prepared(torch.ones(3, 20)), torch.full((3, 20), 3.0))
    with pytest.raises(InputError, match=r"has size 10 in dimension 1, .* needs a multiple of 4"):
        prepared(torch.randn(2, 10))


class PadsToWindows(nn.Module):
    """Attends inside of windows of 7, and pads or resizes the image only where it has to."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.conv, self.fc, self.way = nn.Conv2d(3, 4, 1), nn.Linear(4, 4), way

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        height, width = y.shape[2:]
        down, right = -height % 7, -width % 7
        if self.way == "pads both" and (down > 0 or right > 0):
            y = F.pad(y, (0, right, 0, down))
        if self.way == "pads each":
            y = F.pad(y, (0, 0, 0, down)) if down else y
            y = F.pad(y, (0, right)) if right != 0 else y
        if self.way == "resizes" and (height + down != height or width + right != width):
            y = F.interpolate(y, (height + down, width + right), mode="bilinear", align_corners=False)
        if self.way == "shifts" and down > 0:
            y = F.pad(y, (0, right, 0, down)) * 2
        y = y.unflatten(2, (-1, 7)).unflatten(4, (-1, 7)).permute(0, 2, 4, 3, 5, 1)
        y = self.fc(y.softmax(4)).permute(0, 5, 1, 3, 2, 4).flatten(2, 3).flatten(3, 4)
        return y[:, :, :height, :width]


@pytest.mark.parametrize("way", ["pads both", "pads each", "resizes"])
def test_a_size_at_which_the_model_leaves_out_what_changes_nothing(way: str) -> None:
    torch.manual_seed(0)
    model = PadsToWindows(way)
    prepared = quietly(model, torch.randn(2, 3, 20, 22), QConfigMapping())
    for height, width in ((20, 22), (14, 21), (7, 7), (8, 7), (21, 23), (33, 40), (35, 28)):
        x = torch.randn(1, 3, height, width)
        torch.testing.assert_close(prepared(x), model(x))


def test_a_size_at_which_the_model_leaves_out_what_changes_something() -> None:
    model = PadsToWindows("shifts")
    prepared = quietly(model, torch.randn(2, 3, 20, 20), QConfigMapping())
    x = torch.randn(1, 3, 19, 19)
    torch.testing.assert_close(prepared(x), model(x))
    with pytest.raises(InputError, match=r"has size 21 in dimension 2, .* because of .*down > 0"):
        prepared(torch.randn(1, 3, 21, 21))


@pytest.mark.parametrize("behind", [False, True])
def test_a_cut_that_changes_nothing_at_its_end_changes_something_beyond(behind: bool) -> None:
    class Cuts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(3, 3, 1) if behind else nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            return y * 2 if y.size(2) < 59 else y[:, :, :59] * 2

    model = Cuts()
    prepared = quietly(model, torch.randn(2, 3, 20), QConfigMapping())
    for steps in (1, 20, 58):
        x = torch.randn(3, 3, steps)
        torch.testing.assert_close(prepared(x), model(x))
    with pytest.raises(InputError, match=r"size 80 in dimension 2, .* needs 1 to 58, because of"):
        prepared(torch.randn(2, 3, 80))


def test_a_rule_about_two_sizes_at_once() -> None:
    model = Decides("n * b > 12")
    prepared = quietly(model, torch.randn(2, 3, 16), QConfigMapping())
    for shape in ((2, 3, 16), (7, 3, 4), (1, 3, 40)):
        x = torch.randn(shape)
        torch.testing.assert_close(prepared(x), model(x))
    for shape in ((2, 3, 12), (1, 3, 16), (3, 3, 8)):
        with pytest.raises(InputError, match="the captured model needs"):
            prepared(torch.randn(shape))


def test_every_form_keeps_the_rule() -> None:
    torch.manual_seed(0)
    model, x = Windows(), torch.randn(2, 3, 16)
    prepared = quietly(model, x, get_default_qconfig_mapping("x86"))
    calibrate(prepared, [(x,)])
    reference, converted = tc.convert_to_reference_fx(prepared), tc.convert_fx(prepared)
    other, small = torch.randn(3, 3, 20), torch.randn(2, 3, 6)
    for form in (prepared, reference, converted, copy.deepcopy(converted)):
        assert form(other).shape == (3, 4)
        with pytest.raises(InputError, match=r"size 6 in dimension 2, .* needs at least 10"):
            form(small)
    program = tc.export(converted, (x,)).module()
    assert torch.equal(program(other), converted.reference(other))
    with pytest.raises(AssertionError, match=">= 10"):
        program(small)
    every_size = {0: Dim.AUTO, 2: Dim.AUTO}
    # torch.export calls none of them: it interprets their graphs, or, if it is strict, calls ``forward``.
    for form, strict in ((reference, False), (converted, False), (converted, True)):
        alone = torch.export.export(form, (x,), dynamic_shapes=(every_size,), strict=strict).module()
        assert torch.equal(alone(other), form(other))
        with pytest.raises(AssertionError, match=">= 10"):
            alone(small)
    with pytest.raises(InputError, match=r"size 6 in dimension 2, .* needs at least 10"):
        torch.export.export(converted, (small,))
    for scripted in (torch.jit.script(converted), torch.jit.trace(converted, (x,))):
        assert torch.equal(scripted(other), converted(other))
        with pytest.raises(torch.jit.Error, match="at least 10"):
            scripted(small)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_form_keeps_the_rule(dynamic: bool) -> None:
    model, x = Windows(), torch.randn(2, 3, 16)
    reference = tc.convert_to_reference_fx(quietly(model, x, QConfigMapping()))
    compiled = torch.compile(reference, backend="eager", dynamic=dynamic)
    other = torch.randn(3, 3, 20)
    torch.testing.assert_close(compiled(x), model(x))
    torch.testing.assert_close(compiled(other), model(other))
    with pytest.raises(InputError, match=r"size 6 in dimension 2, .* needs at least 10"):
        compiled(torch.randn(2, 3, 6))


@pytest.mark.parametrize(
    ("batch", "words", "right", "wrong"),
    [
        (Dim("batch", max=8), "at most 8", (2, 8), (9, 12)),
        (Dim.DYNAMIC(min=3, max=9), "at least 3", (3, 9), (2, 12)),
    ],
    ids=["named", "dynamic"],
)
def test_the_limits_of_a_dim_are_kept(
    batch: Any, words: str, right: tuple[int, ...], wrong: tuple[int, ...]
) -> None:
    """Within them torch.export has no guard for what Python decides beyond."""

    class Doubles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            return y * 2 if y.shape[0] > 10 else y

    model, x = Doubles().eval(), torch.randn(4, 5, 4)
    prepared = tc.prepare_fx(model, QConfigMapping(), (x,), dynamic_shapes=({0: batch},))
    assert words in str(tc.explain(prepared))
    for form in (prepared, tc.convert_fx(prepared)):
        for size in right:
            x = torch.randn(size, 5, 4)
            torch.testing.assert_close(form(x), model.linear(x))
        for size in wrong:
            with pytest.raises(InputError, match=f"size {size} in dimension 0, .* captured model needs "):
                form(torch.randn(size, 5, 4))


class _ExpandsPositions(nn.Module):
    """Expands its positions unless the batch is one, and masks unless the sequence is one, as Llama does."""

    def __init__(self, *, is_limited: bool = False) -> None:
        super().__init__()
        self.linear, self.positions, self.causal = nn.Linear(4, 4), nn.Embedding(16, 4), True
        self.is_limited = is_limited

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])[None]
        if x.shape[0] != places.shape[0]:
            places = places.expand(x.shape[0], -1)
        assert x.shape[1] + 0 - places.shape[-1] <= 0
        y = self.linear(x + self.positions(places % 16))
        if self.is_limited and (x.shape[1] > 300 or y.shape[0] > 200):
            y = y * 2
        scores = y @ y.transpose(1, 2)
        # At a length of one a symbol of truth, which torch's own functions refuse, if it is not answered.
        is_causal = y.shape[1] > 1 and self.causal
        y = F.scaled_dot_product_attention(y, y, y, is_causal=is_causal)
        if is_causal:
            scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1).bool(), -30.0)
        return scores.softmax(-1) @ y


@pytest.mark.parametrize("shape", [(1, 6, 4), (3, 6, 4), (3, 1, 4), (1, 1, 4)])
def test_a_size_of_one_at_which_nothing_changes_is_free(shape: tuple[int, ...]) -> None:
    model = _ExpandsPositions().eval()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", r"(?s).*TQ6\d\d", QuantizationWarning)
        warnings.filterwarnings("ignore", r"(?s).*TQ437", QuantizationWarning)
        prepared = tc.prepare_fx(model, get_default_qconfig_mapping("x86"), (torch.randn(shape),))
    for sizes in [(1, 6), (2, 6), (5, 9), (1, 1), (4, 1), (1, 12)]:
        x = torch.randn(*sizes, 4)
        torch.testing.assert_close(prepared(x), model(x))


@pytest.mark.parametrize("shape", [(1, 6, 4), (3, 1, 4)])
def test_other_limits_are_kept_where_a_size_of_one_is_free(shape: tuple[int, ...]) -> None:
    model = _ExpandsPositions(is_limited=True).eval()
    prepared = quietly(model, torch.randn(shape), get_default_qconfig_mapping("x86"))
    for sizes in [(1, 300), (200, 1)]:
        x = torch.randn(*sizes, 4)
        torch.testing.assert_close(prepared(x), model(x))
    for sizes in [(1, 301), (201, 1)]:
        with pytest.raises(InputError, match="TQ901"):
            prepared(torch.randn(*sizes, 4))


@pytest.mark.parametrize(("batch", "refused"), [(1, 3), (3, 1)])
def test_a_size_of_one_at_which_the_model_changes_is_refused(batch: int, refused: int) -> None:
    model, x = Decides("b == 1").eval(), torch.randn(batch, 3, 8)
    prepared = quietly(model, x, get_default_qconfig_mapping("x86"))
    torch.testing.assert_close(prepared(x), model(x))
    with pytest.raises(InputError, match=r"(?s)in dimension 0.*TQ901"):
        prepared(torch.randn(refused, 3, 8))
