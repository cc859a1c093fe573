"""Models that write their loop over time in Python, as people write them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["LOOPS", "LoopCase", "LoopModel"]

Forward = Callable[..., Any]


class LoopModel(nn.Module):
    """The modules that the loops below use."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.cell = nn.GRUCell(6, 8)
        self.lstm_cell = nn.LSTMCell(6, 8)
        self.upper_cell = nn.LSTMCell(8, 8)
        self.decoder_cell = nn.GRUCell(16, 8)
        self.cells = nn.ModuleList([nn.GRUCell(6, 8), nn.GRUCell(8, 8)])
        self.lstm = nn.LSTM(6, 8, 2, batch_first=True)
        self.words = nn.LSTM(8, 8)
        self.embedding = nn.Embedding(20, 8)
        self.query = nn.Linear(8, 8)
        self.i2h = nn.Linear(6, 8)
        self.h2h = nn.Linear(8, 8)
        self.output = nn.Linear(8, 20)
        self.both = nn.Linear(16, 20)
        vars(self)["given"] = forward

    def forward(self, *args: Tensor) -> Any:
        return self.given(self, *args)


def over_columns(model: Any, x: Tensor) -> Any:
    h, outputs = x.new_zeros(x.size(0), 8), []
    for t in range(x.size(1)):
        h = model.cell(x[:, t], h)
        outputs.append(model.output(h))
    return torch.stack(outputs, 1), h


def time_sequence(model: Any, x: Tensor) -> Tensor:
    """From torch's examples: two stacked cells over the chunks of ``split``."""
    h, c = torch.zeros(x.size(0), 8), torch.zeros(x.size(0), 8)
    h2, c2 = torch.zeros(x.size(0), 8), torch.zeros(x.size(0), 8)
    outputs = []
    for piece in x.split(1, dim=1):
        h, c = model.lstm_cell(piece.squeeze(1), (h, c))
        h2, c2 = model.upper_cell(h, (h2, c2))
        outputs += [model.output(h2)]
    return torch.cat(outputs, dim=1)


def stacked_cells(model: Any, x: Tensor) -> Tensor:
    states = [torch.zeros(x.size(0), 8) for _ in model.cells]
    for value in x.unbind(1):
        for index, cell in enumerate(model.cells):
            value = states[index] = cell(value, states[index])
    return model.output(value)


def backward(model: Any, x: Tensor) -> Tensor:
    h, outputs = x.new_zeros(x.size(0), 8), []
    for t in reversed(range(x.size(1))):
        h = model.cell(x[:, t], h)
        outputs.insert(0, h)
    return model.output(torch.stack(outputs, 1))


def both_ways(model: Any, x: Tensor) -> Tensor:
    forward, back = x.new_zeros(x.size(0), 8), x.new_zeros(x.size(0), 8)
    ahead, behind = [], []
    for t in range(x.size(1)):
        forward = model.cell(x[:, t], forward)
        ahead.append(forward)
    for t in range(x.size(1)):
        back = model.cells[0](x[:, x.size(1) - 1 - t], back)
        behind.append(back)
    return model.both(torch.cat([torch.stack(ahead, 1), torch.stack(behind[::-1], 1)], 2))


def layer_by_layer(model: Any, x: Tensor) -> Tensor:
    h, lower, upper = x.new_zeros(x.size(0), 8), [], []
    for t in range(x.size(1)):
        h = model.cells[0](x[:, t], h)
        lower.append(h)
    h = x.new_zeros(x.size(0), 8)
    for value in lower:
        h = model.cells[1](value, h)
        upper.append(h)
    return model.output(torch.stack(upper, 1))


def single_steps(model: Any, x: Tensor) -> Any:
    """Single steps of nn.LSTM; the first one gets no states."""
    hidden, outputs = None, []
    for t in range(x.size(1)):
        y, hidden = model.lstm(x[:, t : t + 1], hidden)
        outputs.append(model.output(y))
    return torch.cat(outputs, 1), hidden


def elman(model: Any, x: Tensor) -> Tensor:
    h = torch.zeros(x.size(0), 8)
    for value in x.transpose(0, 1):
        h = torch.tanh(model.i2h(value) + model.h2h(h))
    return model.output(h)


def _attend(model: Any, token: Tensor, h: Tensor, encoded: Tensor) -> tuple[Tensor, Tensor]:
    weights = torch.softmax(torch.bmm(encoded, model.query(h).unsqueeze(2)), 1)
    context = (encoded * weights).sum(1)
    h = model.decoder_cell(torch.cat([model.embedding(token), context], 1), h)
    return h, model.both(torch.cat([h, context], 1))


def teacher_forcing(model: Any, x: Tensor, words: Tensor) -> Tensor:
    encoded, (h, _) = model.lstm(x)
    h, outputs = h[-1], []
    for t in range(words.size(1)):
        h, output = _attend(model, words[:, t], h, encoded)
        outputs.append(output)
    return torch.stack(outputs, 1)


def greedy(model: Any, x: Tensor, words: Tensor) -> Tensor:
    encoded, (h, _) = model.lstm(x)
    h, token, outputs = h[-1], words[:, 0], []
    for _ in range(words.size(1)):
        h, output = _attend(model, token, h, encoded)
        outputs.append(output)
        token = output.argmax(1)
    return torch.stack(outputs, 1)


def into_a_buffer(model: Any, x: Tensor, words: Tensor) -> Tensor:
    """As in seq2seq tutorials: outputs[t] = ..., and the first row stays zero."""
    h = model.i2h(x[:, 0]).unsqueeze(0)
    state = (h, torch.zeros_like(h))
    words = words.t()
    outputs = torch.zeros(words.size(0), words.size(1), 20)
    for t in range(1, words.size(0)):
        y, state = model.words(model.embedding(words[t - 1]).unsqueeze(0), state)
        outputs[t] = model.output(y.squeeze(0))
    return outputs


def encoder_and_decoder(model: Any, x: Tensor, words: Tensor) -> Tensor:
    """Two loops of different lengths."""
    h = x.new_zeros(x.size(0), 8)
    for t in range(x.size(1)):
        h = model.cell(x[:, t], h)
    outputs = torch.zeros(words.size(0), words.size(1), 20)
    for t in range(words.size(1)):
        h = model.cells[1](model.embedding(words[:, t]), h)
        outputs[:, t] = model.output(h)
    return outputs


def grows(model: Any, x: Tensor) -> Tensor:
    h, outputs = x.new_zeros(x.size(0), 8), x.new_zeros(x.size(0), 0, 8)
    for t in range(x.size(1)):
        h = model.cell(x[:, t], h)
        outputs = torch.cat([outputs, h.unsqueeze(1)], 1)
    return outputs


def counts(model: Any, x: Tensor) -> Tensor:
    h = x.new_zeros(x.size(0), 8)
    for t in range(x.size(1)):
        h = model.cell(x[:, t] * (1 + t), h)
    return model.output(h)


def every_second(model: Any, x: Tensor) -> Tensor:
    h = x.new_zeros(x.size(0), 8)
    for t in range(0, x.size(1), 2):
        h = model.cell(x[:, t], h)
    return model.output(h)


def looks_back(model: Any, x: Tensor) -> Tensor:
    """Every step reads all outputs so far."""
    h, outputs = x.new_zeros(x.size(0), 8), []
    for t in range(x.size(1)):
        outputs.append(model.cell(x[:, t], h))
        h = torch.stack(outputs, 1).mean(1)
    return model.output(h)


def every_third_is_forced(model: Any, x: Tensor, words: Tensor) -> Tensor:
    h, token, outputs = x.new_zeros(x.size(0), 8), words[:, 0], []
    generator = random.Random(0)
    for t in range(words.size(1)):
        h = model.cells[1](model.embedding(token), h)
        outputs.append(model.output(h))
        token = words[:, t] if generator.random() < 0.3 else outputs[-1].argmax(1)
    return torch.stack(outputs, 1)


@dataclass(frozen=True)
class LoopCase:
    """A model and its inputs.

    Attributes:
        takes_words: whether the length is that of a second input, of words.
        loops: the number of loops.
    """

    forward: Forward
    takes_words: bool = False
    loops: int = 1

    def model(self) -> LoopModel:
        torch.manual_seed(0)
        return LoopModel(self.forward).eval()

    def inputs(self, steps: int, batch: int = 2, *, seed: int = 0) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        if not self.takes_words:
            return (torch.randn(batch, steps, 6, generator=generator),)
        x = torch.randn(batch, steps + 2 if self.loops > 1 else 3, 6, generator=generator)
        return x, torch.randint(20, (batch, steps), generator=generator)


LOOPS = {
    case.forward.__name__: case
    for case in (
        LoopCase(over_columns),
        LoopCase(time_sequence),
        LoopCase(stacked_cells),
        LoopCase(backward),
        LoopCase(both_ways, loops=2),
        LoopCase(layer_by_layer, loops=2),
        LoopCase(single_steps),
        LoopCase(elman),
        LoopCase(teacher_forcing, takes_words=True),
        LoopCase(greedy, takes_words=True),
        LoopCase(into_a_buffer, takes_words=True),
        LoopCase(encoder_and_decoder, takes_words=True, loops=2),
        LoopCase(grows),
        LoopCase(counts),
        LoopCase(every_second),
        LoopCase(looks_back, loops=0),
        LoopCase(every_third_is_forced, takes_words=True, loops=0),
    )
}
