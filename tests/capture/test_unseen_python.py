"""``tensor.data``, ``len(tensor)`` and ``int(size)`` in the code of a model: traced, and free in their
sizes."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import QConfigMapping, get_default_qconfig_mapping
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import torchq_compat as tc
from tests.helpers.oracle import calibrate, leaves
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
    """As written for torch 0.3: everything is taken out of its Variable."""
    by_length, order = lengths.data.sort(0, descending=True)
    back = torch.arange(0, len(lengths)).index_select(0, order.sort(0)[1])
    packed = pack_padded_sequence(x.index_select(0, order), by_length.data.tolist(), batch_first=True)
    output, (h, _) = model.rnn(packed)
    output, _ = pad_packed_sequence(output, batch_first=True)
    return model.fc(output.index_select(0, back)), h.data[-1].index_select(0, back)


def tagger(model: Any, x: Tensor, _lengths: Tensor) -> Any:
    """Of torch's tutorials: a sentence of ``len(sentence)`` words."""
    sentence = x[0]
    output, _ = model.steps_first(sentence.view(len(sentence), 1, -1))
    return model.fc(output.view(len(sentence), -1))


def to_whole_strides(model: Any, x: Tensor, _lengths: Tensor) -> Any:
    """Pads as Demucs does."""
    length = int(math.ceil((x.size(1) - 3) / 4) * 4 + 3)
    output, _ = model.rnn(nn.functional.pad(x, (0, 0, 0, length - x.size(1))))
    return model.fc(output)[:, : int(x.size(1) * 0.5)], output[:, int(length / 2) :]


def cut_to_the_longest(model: Any, x: Tensor, lengths: Tensor) -> Any:
    longest = int(lengths.max())
    mask = torch.arange(longest)[None] < lengths[:, None]
    return model.fc(model.rnn(x[:, :longest])[0]) * mask[..., None]


def looks_at_the_class(model: Any, x: Tensor, _lengths: Tensor) -> Any:
    """What else is done with ``int`` is not taken away from it."""
    assert isinstance(int("3"), int)
    assert list(map(int, "12")) == [1, 2]
    return model.fc(model.rnn(x)[0]).to(int)


@pytest.mark.parametrize("forward", [sorted_by_hand, tagger, to_whole_strides, cut_to_the_longest])
def test_both_are_free(forward: Forward) -> None:
    torch.manual_seed(0)
    model = model_of(forward)
    prepared = tc.prepare_fx(model, get_default_qconfig_mapping("x86"), sequences(4, 7), map_all())
    calibrate(prepared, [sequences(5, 9) for _ in range(4)])
    reference = tc.convert_to_reference_fx(prepared)
    looped = with_plain_loops(reference, model)
    for given in (sequences(6, 11), sequences(2, 4), sequences(1, 3)):
        check_against_plain_loops(model(*given), reference(*given), looped(*given))


def test_int_stays_a_class() -> None:
    model, given = model_of(looks_at_the_class), sequences(4, 7)
    prepared = tc.prepare_fx(model, QConfigMapping(), given)
    assert torch.equal(model(*given), prepared(*given))


def cached(model: Any, x: Tensor, _lengths: Tensor) -> Any:
    table = {4: 2.0, 5: 3.0}
    return model.fc(model.rnn(x)[0]) * table[len(x)]


def test_a_length_that_has_to_be_an_integer_is_one() -> None:
    model, given = model_of(cached), sequences(4, 7)
    prepared = tc.prepare_fx(model, QConfigMapping(), given)
    for a, b in zip(leaves(model(*given)), leaves(prepared(*given)), strict=True):
        torch.testing.assert_close(a, b)
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
