"""Outputs of a recurrent module taken apart in every way that a model may do it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig_mapping

import torchq_compat as tc
from tests.helpers.oracle import calibrate, leaves, sqnr
from tests.helpers.packed_models import map_all
from tests.helpers.plain_loops import check_against_plain_loops, with_plain_loops

HIDDEN = 8


def of_output(output: Tensor) -> dict[str, Any]:
    steps, batch, width = output.shape
    return {
        "every second step": output[::2],
        "negative": (
            output[-1],
            output[-2:],
            output[..., -3:],
            output[-1, :, :HIDDEN],
            output[0, :, HIDDEN:],
        ),
        "directions": list(output.view(steps, batch, 2, HIDDEN).unbind(2)),
        "summed": output.view(steps, batch, 2, -1).sum(2).view(steps, batch, -1),
        "flat": output.transpose(0, 1).reshape(batch, -1, width)[:, -1],
        "columns": (output.chunk(2, -1), output.split([3, width - 3], -1)[1], output.unbind(-1)[2]),
        "backwards": output.flip(0)[0],
        "new axes": output[:, None, :, 1:7:3],
    }


def of_state(h: Tensor, layers: int) -> dict[str, Any]:
    batch = h.size(1)
    by_layer = h.view(layers, 2, batch, HIDDEN)
    return {
        "layers": (by_layer[-1], by_layer[-1, 0], by_layer[:, 1], next(iter(by_layer.unbind(0)))),
        "last two": torch.cat((h[-2], h[-1]), 1),
        "last two, sliced": torch.cat((h[-2, :, :], h[-1, :, :]), dim=1),
        "each": [row * 2 for row in h],
        "stacked": torch.stack(list(h.unbind())[::-1]),
        "strided": (h[::2], h[1::2], h[-1:], h[:-1]),
        "joined": h.transpose(0, 1).reshape(batch, -1),
        "permuted": h.permute(1, 0, 2).contiguous().view(batch, -1)[:, HIDDEN:],
        "summed": h[-1] + h[-2],
        "mean": h.mean(0),
    }


class TakesApart(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], layers: int, names: list[str]) -> None:
        super().__init__()
        self.rnn = kind(6, HIDDEN, layers, bidirectional=True)
        self.layers, self.names = layers, names
        self.fc = nn.Linear(2 * HIDDEN, 3)

    def forward(self, x: Tensor) -> Any:
        result = self.rnn(x)
        states = result[1] if isinstance(result[1], tuple) else (result[1],)
        ways = {f"output, {name}": way for name, way in of_output(result[0]).items()}
        for index, state in enumerate(states):
            ways |= {f"state {index}, {name}": way for name, way in of_state(state, self.layers).items()}
        taken = {name: ways[name] for name in self.names if name in ways}
        return taken, self.fc(torch.cat((states[0][-2], states[0][-1]), -1))


def names_of(kind: type[nn.RNNBase], seed: int) -> list[str]:
    """Return some of the ways, in random order."""
    ways = [f"output, {name}" for name in of_output(torch.zeros(4, 2, 2 * HIDDEN))]
    for index in range(2 if kind is nn.LSTM else 1):
        ways += [f"state {index}, {name}" for name in of_state(torch.zeros(4, 2, HIDDEN), 2)]
    choice = random.Random(seed)
    choice.shuffle(ways)
    return ways if seed == 0 else ways[: choice.randint(1, 6)]


@pytest.mark.parametrize(
    ("kind", "layers", "seed"),
    [
        (nn.LSTM, 2, 0),
        (nn.GRU, 1, 0),
        *(pytest.param(nn.LSTM, 1 + seed % 2, seed, marks=pytest.mark.slow) for seed in range(1, 13)),
    ],
)
def test_every_way(kind: type[nn.RNNBase], layers: int, seed: int) -> None:
    torch.manual_seed(seed)
    model = TakesApart(kind, layers, names_of(kind, seed)).eval()
    prepared = tc.prepare_fx(model, get_default_qconfig_mapping("x86"), (torch.randn(5, 3, 6),), map_all())
    calibrate(prepared, [(torch.randn(9, 24, 6),) for _ in range(2)])
    reference, lowered = tc.convert_to_reference_fx(prepared), tc.convert_fx(prepared)
    assert type(reference.rnn).__name__ == f"Converted{kind.__name__}"
    for steps, batch in ((8, 5), (3, 2)):
        x = torch.randn(steps, batch, 6)
        exact, found, fast = (leaves(each(x)) for each in (model, reference, lowered))
        assert len(exact) == len(found) == len(fast) > 1
        check_against_plain_loops(exact, found, with_plain_loops(reference, model)(x))
        for a, b, c in zip(exact, found, fast, strict=True):
            # Of a product with a number the reference rounds again, and the lowered model does not.
            assert sqnr(b, c) > 35 or sqnr(a, c) > 2 + sqnr(a, b)
