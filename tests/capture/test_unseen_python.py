"""``tensor.data``, ``len(tensor)`` and ``int(size)`` in the code of a model: traced, with free sizes."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from contextlib import nullcontext
from math import sqrt as root
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import QConfigMapping, get_default_qconfig_mapping
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import torchq_compat as tc
from tests.helpers.oracle import calibrate, sqnr
from tests.helpers.packed_models import map_all
from tests.helpers.plain_loops import check_against_plain_loops, with_plain_loops
from torchq_compat.errors import CaptureError, InputError

Forward = Callable[..., Any]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 8, batch_first=True)
        self.steps_first = nn.LSTM(6, 8)
        self.fc = nn.Linear(8, 3)


def model_of(forward: Forward) -> nn.Module:
    made: nn.Module = type(forward.__name__, (Model,), {"forward": forward})()
    return made.eval()


def sequences(batch: int, steps: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, steps, 6), torch.randint(1, steps + 1, (batch,))


def sorted_by_hand(model: Any, x: Tensor, lengths: Tensor) -> Any:
    """As written for torch 0.3: every tensor is taken out of its Variable."""
    by_length, order = lengths.data.sort(0, descending=True)
    back = torch.arange(0, len(lengths)).index_select(0, order.sort(0)[1])
    packed = pack_padded_sequence(x.index_select(0, order), by_length.data.tolist(), batch_first=True)
    output, (h, _) = model.rnn(packed)
    output, _ = pad_packed_sequence(output, batch_first=True)
    return model.fc(output.index_select(0, back)), h.data[-1].index_select(0, back)


def tagger(model: Any, x: Tensor, _lengths: Tensor) -> Any:
    """From torch's tutorials: a sentence of ``len(sentence)`` words."""
    sentence = x[0]
    output, _ = model.steps_first(sentence.view(len(sentence), 1, -1))
    return model.fc(output.view(len(sentence), -1))


def to_whole_strides(model: Any, x: Tensor, _lengths: Tensor) -> Any:
    """Pad as Demucs does."""
    length = int(math.ceil((x.size(1) - 3) / 4) * 4 + 3)
    output, _ = model.rnn(nn.functional.pad(x, (0, 0, 0, length - x.size(1))))
    return model.fc(output)[:, : int(x.size(1) * 0.5)], output[:, int(length / 2) :]


def cut_to_the_longest(model: Any, x: Tensor, lengths: Tensor) -> Any:
    longest = int(lengths.max())
    mask = torch.arange(longest)[None] < lengths[:, None]
    return model.fc(model.rnn(x[:, :longest])[0]) * mask[..., None]


def lengths_in_a_list(model: Any, x: Tensor, lengths: Tensor) -> Any:
    longest, total = max(lengths.tolist()), sum(lengths)
    packed = pack_padded_sequence(x, list(lengths), batch_first=True, enforce_sorted=False)
    output, _ = pad_packed_sequence(model.rnn(packed)[0], batch_first=True)
    return model.fc(output), model.rnn(x[:, :longest])[0].sum((0, 1)) / total


def sorted_in_a_list(model: Any, x: Tensor, lengths: Tensor) -> Any:
    falling = sorted(lengths.tolist(), reverse=True)
    packed = pack_padded_sequence(x[:, : falling[0]], tuple(falling), batch_first=True)
    return pad_packed_sequence(model.rnn(packed)[0], batch_first=True)[0]


def looks_at_the_class(model: Any, x: Tensor, _lengths: Tensor) -> Any:
    """Other uses of ``int`` keep working."""
    assert isinstance(int("3"), int)
    kept = list[int]()
    kept.extend(map(int, "12"))
    assert tuple[int, ...](kept) == (1, 2)
    assert tuple(kept) == (1, 2)
    return model.fc(model.rnn(x)[0]).to(int)


@pytest.mark.parametrize(
    "forward",
    [
        sorted_by_hand,
        tagger,
        to_whole_strides,
        cut_to_the_longest,
        lengths_in_a_list,
        pytest.param(sorted_in_a_list, marks=pytest.mark.slow),
    ],
)
def test_both_are_free(forward: Forward) -> None:
    torch.manual_seed(0)
    model = model_of(forward)
    prepared = tc.prepare_fx(model, get_default_qconfig_mapping("x86"), sequences(4, 7), map_all())
    calibrate(prepared, [sequences(5, 9) for _ in range(4)])
    reference = tc.convert_to_reference_fx(prepared)
    looped = with_plain_loops(reference, model)
    for given in (sequences(6, 11), sequences(2, 4), sequences(1, 3)):
        check_against_plain_loops(model(*given), reference(*given), looped(*given))


class Square(nn.Module):
    """A convolution over tokens, as of vision transformers with pyramids."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.conv = nn.Linear(8, 8), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        batch, tokens, width = x.shape
        side = int(math.sqrt(tokens))
        y = self.conv(x.transpose(1, 2).reshape(batch, width, side, side)).flatten(2).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(y, y, y, scale=1 / root(tokens)) + x


def test_roots_of_sizes_are_free() -> None:
    torch.manual_seed(0)
    model, x = Square().eval(), torch.randn(2, 16, 8)
    prepared = tc.prepare_fx(model, get_default_qconfig_mapping("x86"), (x,))
    calibrate(prepared, [(x,)])
    converted = tc.convert_fx(prepared)
    for batch, tokens in ((2, 16), (1, 4), (3, 25), (2, 64)):
        x = torch.randn(batch, tokens, 8)
        assert 20 < sqnr(model(x), converted(x)) < 60


def _positions(height: int, width: int) -> Tensor:
    rows, columns = (torch.arange(0.5, size) / float(size) for size in (height, width))
    return rows[:, None] + columns


def _wrapped_positions(height: int, width: int) -> Tensor:
    return _positions(height, width)


torch.fx.wrap("_wrapped_positions")


class Image(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + _positions(*x.shape[2:]) - 2 * _wrapped_positions(*x.shape[2:])


def test_functions_that_methods_call_follow_sizes_too() -> None:
    prepared = tc.prepare_fx(Image().eval(), QConfigMapping(), (torch.randn(2, 3, 4, 6),))
    for shape in ((1, 3, 4, 6), (2, 3, 9, 7)):
        x = torch.randn(shape)
        assert torch.equal(prepared(x), Image()(x))
    assert _positions.__globals__ is globals()


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


class Decorated(nn.Module):
    """Roots of sizes in decorated methods, a static one, and a function that a method closes over."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    @staticmethod
    def scale(x: Tensor) -> Any:
        return 1 / math.sqrt(x.shape[1])

    @torch.no_grad()
    def scale_without_gradient(self, x: Tensor) -> Any:
        return math.sqrt(len(x))

    @logged
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.scale(x) + self.scale_without_gradient(x)


def test_decorated_and_static_methods_follow_sizes_too() -> None:
    torch.manual_seed(0)
    model = Decorated().eval()
    prepared = tc.prepare_fx(model, QConfigMapping(), (torch.randn(2, 6, 8),))
    for shape in ((2, 6, 8), (3, 4, 8), (1, 9, 8)):
        x = torch.randn(shape)
        torch.testing.assert_close(prepared(x), model(x))
    assert Decorated.forward.__wrapped__.__globals__ is globals()  # type: ignore[attr-defined]


def halves(x: Tensor) -> Tensor:
    half, remaining = divmod(x.shape[1], 2)
    return x[:, : half + remaining]


def rounded(x: Tensor) -> Tensor:
    return x[:, : max(1, round(x.shape[1] * 0.5))] * round(x.shape[1] / 3, 1)


def root_of_numpy(x: Tensor) -> Tensor:
    return x / np.sqrt(x.size(1)) + x.size(0) // np.floor(2.5)


def padded_by_numpy(x: Tensor) -> Tensor:
    return nn.functional.pad(x, (0, 0, 0, int(np.ceil(x.shape[1] / 4)) * 4 - x.shape[1]))


def product_of_numpy(x: Tensor) -> Tensor:
    return x.reshape(int(np.prod(x.shape[:-1])), 8).view(x.shape)


def imports_inside(x: Tensor) -> Tensor:
    import math as numbers
    from math import sqrt

    return x * numbers.sqrt(x.shape[1]) / sqrt(x.shape[0])


def new_tensor(x: Tensor) -> Tensor:
    return x / x.new_tensor(float(x.shape[1])) + x.new_tensor([1.0, 2.0]).sum()


class Around(nn.Module):
    """A layer, and what a function does with its result."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.function = nn.Linear(8, 8), function

    @logged
    def forward(self, x: Tensor) -> Tensor:
        return self.apply_to(self.fc(x))

    def apply_to(self, x: Tensor) -> Tensor:
        raise NotImplementedError


def around(function: Callable[[Tensor], Tensor]) -> nn.Module:
    class Own(Around):
        def apply_to(self, x: Tensor) -> Tensor:
            return function(x)

    return Own(function).eval()


@pytest.mark.parametrize(
    "function",
    [halves, rounded, root_of_numpy, padded_by_numpy, product_of_numpy, imports_inside, new_tensor],
)
def test_numbers_of_sizes_are_free(function: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, x = around(function), torch.randn(2, 6, 8)
    prepared = tc.prepare_fx(model, get_default_qconfig_mapping("x86"), (x,))
    calibrate(prepared, [(torch.randn(8, steps, 8),) for steps in (2, 4, 11)])
    converted = tc.convert_fx(prepared)
    program = tc.export(converted, (x,)).module()
    for shape in ((2, 6, 8), (3, 11, 8), (1, 4, 8), (4, 2, 8)):
        x = torch.randn(shape)
        assert 20 < sqnr(model(x), converted(x)) < 60
        assert torch.equal(program(x), converted(x))


def test_a_function_of_numpy_that_no_graph_has_asks_for_the_size() -> None:
    model = around(lambda x: x * np.log(x.shape[1]))
    with pytest.warns(UserWarning, match="dimension 1"):
        prepared = tc.prepare_fx(model, QConfigMapping(), (torch.randn(2, 6, 8),))
    torch.testing.assert_close(prepared(torch.ones(5, 6, 8)), model(torch.ones(5, 6, 8)))
    with pytest.raises(InputError, match=r"fixed to 6 there, because of test_unseen_python.*np\.log"):
        prepared(torch.randn(2, 7, 8))


def in_windows(model: Any, x: Tensor, _lengths: Tensor) -> Any:
    steps = x.size(1)
    parts = [x[:, start : min(steps, start + 4)] for start in range(0, steps, 4)]
    backwards = [x[:, step] for step in range(steps - 1, -1, -4)]
    return model.rnn(torch.cat(parts, 1))[0], torch.stack(backwards, 1)


def test_a_stride_fixes_how_many_windows_there_are() -> None:
    model = model_of(in_windows)
    with pytest.warns(UserWarning, match=r"dimension 1 at 'input x' is .*5 to 8"):
        prepared = tc.prepare_fx(model, QConfigMapping(), sequences(4, 7))
    for given in (sequences(4, 5), sequences(1, 8), sequences(2, 6)):
        torch.testing.assert_close(prepared(*given), model(*given))
    for steps in (4, 9):
        with pytest.raises(InputError, match="needs 5 to 8"):
            prepared(*sequences(4, steps))


def test_int_stays_a_class() -> None:
    model, given = model_of(looks_at_the_class), sequences(4, 7)
    prepared = tc.prepare_fx(model, QConfigMapping(), given)
    assert torch.equal(model(*given), prepared(*given))


def lengths_one_by_one(model: Any, x: Tensor, lengths: Tensor) -> Any:
    each = [int(length) for length in lengths]
    packed = pack_padded_sequence(x, each, batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(model.rnn(packed)[0], batch_first=True, total_length=x.size(1))[0]


def test_a_loop_over_lengths_fixes_how_many_there_are() -> None:
    model = model_of(lengths_one_by_one)
    with pytest.warns(UserWarning, match="dimension 0 at 'input lengths' is fixed: at 4"):
        prepared = tc.prepare_fx(model, QConfigMapping(), sequences(4, 7))
    given = sequences(4, 9)
    torch.testing.assert_close(prepared(*given), model(*given))
    with pytest.raises(InputError, match="fixed to 4 there"):
        prepared(*sequences(5, 7))


def mask_in_a_loop(model: Any, x: Tensor, lengths: Tensor) -> Any:
    mask = torch.zeros(x.shape[:2])
    for i, length in enumerate(lengths):
        mask[i, :length] = 1
    return model.rnn(x)[0] * mask[..., None]


def over_the_longest(model: Any, x: Tensor, lengths: Tensor) -> Any:
    return torch.stack([model.rnn(x[:, t : t + 1])[0] for t in range(max(lengths))])


def only_if_long(model: Any, x: Tensor, lengths: Tensor) -> Any:
    return model.rnn(x)[0] if lengths.min() > 2 else x


def sorted_by_a_key(model: Any, x: Tensor, lengths: Tensor) -> Any:
    order = sorted(range(x.size(0)), key=lambda i: -lengths[i])
    return model.rnn(x[order])[0]


def negated_array(model: Any, x: Tensor, lengths: Tensor) -> Any:
    return model.rnn(x[(-lengths.numpy()).argsort()])[0]


@pytest.mark.parametrize(
    "forward", [mask_in_a_loop, over_the_longest, only_if_long, sorted_by_a_key, negated_array]
)
def test_what_asks_for_values_is_refused_with_line_and_way(forward: Forward) -> None:
    with pytest.raises(CaptureError, match=r"at test_unseen_python.py:\d+ \(") as caught:
        tc.prepare_fx(model_of(forward), QConfigMapping(), sequences(4, 7))
    for way in ("lengths.max().item()", "arange(x.size(1)) < lengths", "lengths.sort", "pack_padded"):
        assert way in str(caught.value)


def cached(model: Any, x: Tensor, _lengths: Tensor) -> Any:
    table = {4: 2.0, 5: 3.0}
    output, _ = model.rnn(x)
    return model.fc(output) * table[len(x)]


def test_a_length_that_has_to_be_an_integer_is_one() -> None:
    model, given = model_of(cached), sequences(4, 7)
    # Custom modules are called again when the model is traced again.
    prepared = tc.prepare_fx(model, get_default_qconfig_mapping("x86"), given, map_all())
    calibrate(prepared, [given])
    converted = tc.convert_to_reference_fx(prepared)
    check_against_plain_loops(model(*given), converted(*given), with_plain_loops(converted, model)(*given))
    with pytest.raises(InputError, match="fixed to 4"):
        prepared(*sequences(5, 7))


def refused(model: Any, x: Tensor, lengths: Tensor) -> Any:
    return model.fc(model.rnn(x)[0])[: 4 if int(lengths.sum()) > 9 else 2] * len(x)


def test_the_code_of_the_model_is_left_as_it_was() -> None:
    seen: list[bool] = []

    def watching(model: Any, x: Tensor, _lengths: Tensor) -> Any:
        seen.append("len" in vars(sys.modules[__name__]))
        return model.fc(model.rnn(x)[0]) * len(x)

    for forward, raises in ((watching, False), (refused, True)):
        model = model_of(forward)
        with pytest.raises(CaptureError) if raises else nullcontext():
            tc.prepare_fx(model, QConfigMapping(), sequences(4, 7))
        assert type(model).forward is forward
        assert "forward" not in vars(model)
    assert seen
    assert not any(seen)
