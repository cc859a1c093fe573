"""Streaming: random chunks of random sequences give the bits of one call; errors name the path of a module
that cannot be streamed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import QConfigMapping, default_dynamic_qconfig, get_default_qconfig_mapping

import torchq_compat as tc
from tests.helpers.once import made_once
from tests.helpers.oracle import calibrate, leaves, sqnr
from tests.helpers.packed_models import map_all
from tests.helpers.plain_loops import check_against_plain_loops, with_plain_loops
from torchq_compat.errors import ExportError, InputError, QuantizationWarning

MAPPING = get_default_qconfig_mapping("x86")
Forward = Callable[..., Any]


class Model(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.rnn = nn.LSTM(6, 8, 2, batch_first=True)
        self.gru, self.narrow = nn.GRU(8, 5), nn.GRU(6, 4, batch_first=True)
        self.both = nn.LSTM(6, 4, bidirectional=True, batch_first=True)
        self.cell, self.fc = nn.LSTMCell(6, 8), nn.Linear(8, 3)
        self.conv = nn.Conv1d(6, 6, 3, padding=1)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.positions = nn.Embedding(50, 6)
        self.given = forward

    def forward(self, x: Tensor) -> Any:
        return self.given(self, x)


def tagger(model: Any, x: Tensor) -> Any:
    output, _ = model.rnn(torch.relu(model.inner(x)))
    rows = model.fc(output.reshape(-1, 8))
    second, last = model.gru(output.transpose(0, 1))
    return rows.view(x.size(0), x.size(1), 3), second.transpose(0, 1), last


def zeros_of_its_own(model: Any, x: Tensor) -> Any:
    state = torch.zeros(2, x.size(0), 8), torch.zeros(2, x.size(0), 8)
    output, (h, _) = model.rnn(x, state)
    return model.fc(output), h


def last_step(model: Any, x: Tensor) -> Any:
    return model.narrow(x)[0][:, -1]


@made_once
def prepared_and_converted(name: str) -> tuple[nn.Module, Any, Any]:
    """Return a model with the forward of this module that ``name`` names, its reference, and it lowered."""
    torch.manual_seed(0)
    model = Model(globals()[name]).eval()
    prepared = tc.prepare_fx(model, MAPPING, (torch.randn(3, 7, 6),), map_all())
    calibrate(prepared, [(torch.randn(16, 9, 6),)])
    lowered = tc.convert_fx(prepared)
    return model, lowered.reference, lowered


def random_pieces(x: Tensor, seed: int) -> list[Tensor]:
    choice, pieces, start = random.Random(seed), [], 0
    while start < x.size(1):
        count = choice.choice([1, 1, 2, 3, 5])
        pieces.append(x[:, start : start + count])
        start += count
    return pieces


@pytest.mark.parametrize("forward", [tagger, zeros_of_its_own, last_step])
def test_pieces_give_the_bits_of_the_whole(forward: Forward) -> None:
    model, reference, lowered = prepared_and_converted(forward.__name__)
    looped = with_plain_loops(reference, model)
    streams = [(converted, tc.streaming(converted)) for converted in (reference, lowered)]
    for seed, (batch, steps) in enumerate([(2, 9), (5, 5), (1, 4)]):
        x = torch.randn(batch, steps, 6)
        exact, by_loops = model(x), looped(x)
        for converted, stream in streams:
            stream.reset()
            whole = leaves(converted(x))
            pieces = [leaves(stream(piece)) for piece in random_pieces(x, seed)]
            for found, *parts in zip(whole, *pieces, strict=True):
                has_steps = found.dim() == 3 and found.size(1) == steps and forward is not last_step
                joined = torch.cat(parts, 1) if has_steps and found.shape[0] == batch else parts[-1]
                assert torch.equal(joined, found)
            check_against_plain_loops(exact, whole, by_loops)


def test_single_streams_begin_again() -> None:
    _, reference, _ = prepared_and_converted("zeros_of_its_own")
    stream, x, y = tc.streaming(reference), torch.randn(3, 5, 6), torch.randn(3, 4, 6)
    stream(x)
    stream.reset([1, -1])
    found, last = stream(y)
    both = reference(torch.cat([x, y], 1))
    alone = reference(y)
    assert torch.equal(found[0], both[0][0, 5:])
    assert torch.equal(found[1:], alone[0][1:])
    assert torch.equal(last[:, 1:], alone[1][:, 1:])
    assert not torch.equal(found[0], alone[0][0])
    stream.reset(torch.tensor([True, True, False]))
    again, _ = stream(y)
    assert torch.equal(again[:2], alone[0][:2])
    assert not torch.equal(again[2], alone[0][2])
    with pytest.raises(InputError, match=r"\[3\].*3 are kept"):
        stream.reset([3])
    with pytest.raises(InputError, match=r"2 streams.*3 are kept.*\n?.*reset\(\)"):
        stream(y[:2])
    stream.reset()
    assert torch.equal(stream(y[:2])[0], reference(y[:2])[0])
    assert torch.equal(reference(y)[0], alone[0])


def test_the_states_of_the_caller_stay_the_callers() -> None:
    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.second = nn.GRU(6, 8), nn.GRU(8, 4)

        def forward(self, x: Tensor, h: Tensor) -> Any:
            output, h = self.rnn(x, h)
            return self.second(output)[0], h

    torch.manual_seed(0)
    prepared = tc.prepare_fx(
        Stateful().eval(), MAPPING, (torch.randn(7, 3, 6), torch.randn(1, 3, 8)), map_all()
    )
    prepared(torch.randn(7, 3, 6), torch.rand(1, 3, 8))
    converted = tc.convert_to_reference_fx(prepared)
    stream, x, h = tc.streaming(converted), torch.randn(8, 64, 6).clamp(-2, 2), torch.rand(1, 64, 8)
    whole, last = converted(x, h)
    first, state = stream(x[:3], h)
    second, state = stream(x[3:], state)
    # The state that the caller passes back is quantized once more, with the qparams of the model's input.
    assert 20 < sqnr(whole, torch.cat([first, second])) < 60
    assert 25 < sqnr(last, state) < 60


def test_an_exported_stream() -> None:
    _, reference, _ = prepared_and_converted("zeros_of_its_own")
    # The batch differs from the one the model was prepared with; one chunk has a single step.
    x = torch.randn(5, 9, 6)
    program = tc.export(tc.streaming(reference), (x[:, :4],)).module()
    joined = torch.cat([program(piece)[0] for piece in (x[:, :2], x[:, 2:3], x[:, 3:])], 1)
    whole, _ = reference(x)
    assert torch.equal(joined, whole)


def bidirectional(model: Any, x: Tensor) -> Any:
    return model.both(x)[0]


def conv_over_time(model: Any, x: Tensor) -> Any:
    return model.narrow(model.conv(x.transpose(1, 2)).transpose(1, 2))[0]


def pooling_over_time(model: Any, x: Tensor) -> Any:
    return nn.functional.adaptive_max_pool1d(model.narrow(x)[0].transpose(1, 2), 1)


def attention_over_time(model: Any, x: Tensor) -> Any:
    return model.narrow(model.attention(x, x, x, need_weights=False)[0])[0]


def mean_over_time(model: Any, x: Tensor) -> Any:
    return model.narrow(x)[0].mean(1)


def softmax_over_time(model: Any, x: Tensor) -> Any:
    output = model.narrow(x)[0]
    return output * torch.softmax(output.sum(-1, keepdim=True), 1)


def positions_of_steps(model: Any, x: Tensor) -> Any:
    return model.narrow(x + model.positions(torch.arange(x.size(1)))[None])[0]


def state_of_the_sequence(model: Any, x: Tensor) -> Any:
    _, state = model.gru(nn.functional.pad(x, (0, 2)).transpose(0, 1))
    return model.gru(nn.functional.pad(x, (0, 2)).transpose(0, 1), state)[0]


def loop_over_all_steps(model: Any, x: Tensor) -> Any:
    state, outputs, memory = x.new_zeros(x.size(0), 6), [], model.inner(x)
    for t in range(x.size(1)):
        weights = (memory * state[:, None]).sum(-1).softmax(-1)
        state = torch.tanh(x[:, t] + (weights[..., None] * memory).sum(1))
        outputs.append(state)
    return torch.stack(outputs, 1)


def backward_loop(model: Any, x: Tensor) -> Any:
    state = x.new_zeros(x.size(0), 6)
    for t in reversed(range(x.size(1))):
        state = torch.tanh(x[:, t] + model.inner(state))
    return state


def no_recurrence(model: Any, x: Tensor) -> Any:
    return model.inner(x)


@pytest.mark.parametrize(
    ("forward", "says"),
    [
        (bidirectional, "'both'.*bidirectional"),
        (conv_over_time, "conv"),
        (pooling_over_time, "pool|max"),
        (attention_over_time, "attention"),
        (mean_over_time, r"mean.*test_streaming.py:\d+"),
        pytest.param(softmax_over_time, r"softmax.*test_streaming.py:\d+", marks=pytest.mark.slow),
        pytest.param(positions_of_steps, r"arange.*test_streaming.py:\d+", marks=pytest.mark.slow),
        (state_of_the_sequence, "'gru'.*computed from the sequence"),
        pytest.param(loop_over_all_steps, "loop in 'loop'.*several steps", marks=pytest.mark.slow),
        pytest.param(backward_loop, "'loop'.*begins at the end", marks=pytest.mark.slow),
        (no_recurrence, "no recurrent module"),
    ],
)
def test_what_needs_all_steps_is_refused(forward: Forward, says: str) -> None:
    prepared = tc.prepare_fx(Model(forward).eval(), MAPPING, (torch.randn(3, 7, 6),), map_all())
    calibrate(prepared, [(torch.randn(2, 3, 6),)])
    with pytest.raises(ExportError, match=says) as caught:
        tc.streaming(tc.convert_fx(prepared))
    assert "Hint:" in str(caught.value)


def test_what_is_not_converted_is_refused() -> None:
    with pytest.raises(ExportError, match=r"Linear.*convert_fx"):
        tc.streaming(nn.Linear(2, 2))


def test_a_dynamic_module_is_said_and_close() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LSTM(6, 8)).eval()
    dynamic = QConfigMapping().set_global(default_dynamic_qconfig)
    converted = tc.convert_fx(tc.prepare_fx(model, dynamic, (torch.randn(7, 3, 6),)))
    with pytest.warns(QuantizationWarning, match=r"0 are quantized.*range of each chunk"):
        stream = tc.streaming(converted)
    x = torch.randn(9, 2, 6)
    joined = torch.cat([stream(x[:4])[0], stream(x[4:5])[0], stream(x[5:])[0]])
    assert sqnr(model(x)[0], joined) > 25


@pytest.mark.slow
def test_a_compiled_stream_keeps_its_states() -> None:
    _, _, lowered = prepared_and_converted("tagger")
    x = torch.randn(2, 7, 6)
    stream, compiled = tc.streaming(lowered), torch.compile(tc.streaming(lowered))
    for piece in (x[:, :3], x[:, 3:4], x[:, 4:]):
        for expected, found in zip(leaves(stream(piece)), leaves(compiled(piece)), strict=True):
            assert torch.equal(expected, found)


def cell_and_scan(model: Any, x: Tensor) -> Any:
    h = c = x.new_zeros(x.size(0), 8)
    state, outputs = x.new_zeros(x.size(0), 8, 3), []
    for t in range(x.size(1)):
        h, c = model.cell(x[:, t], (h, c))
        state = torch.sigmoid(h)[..., None] * state + model.fc(h)[:, None]
        outputs.append(state.sum(-1))
    return torch.stack(outputs, 1), state


def test_a_loop_keeps_its_states() -> None:
    torch.manual_seed(0)
    model = Model(cell_and_scan).eval()
    prepared = tc.prepare_fx(model, MAPPING, (torch.randn(3, 7, 6),), map_all())
    calibrate(prepared, [(torch.randn(8, 9, 6),)])
    lowered, x = tc.convert_fx(prepared), torch.randn(3, 9, 6)
    reference = lowered.reference
    program = tc.export(tc.streaming(reference), (x[:, :4],)).module()
    for converted in (reference, lowered):
        stream, (whole, last) = tc.streaming(converted), converted(x)
        for run in (stream, program) if converted is reference else (stream,):
            pieces = [run(piece) for piece in x.split([4, 1, 3, 1], 1)]
            assert torch.equal(torch.cat([piece for piece, _ in pieces], 1), whole)
            assert torch.equal(pieces[-1][1], last)
        stream.reset([1])
        again, _ = stream(x)
        assert torch.equal(again[1], whole[1])
        assert not torch.equal(again[0], whole[0])
        with pytest.raises(InputError, match=r"2 streams .*of 3 are kept"):
            stream(x[:2])
