"""Float LSTMs of trial runs: torch's results without the weights that oneDNN packs."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from torchq_compat.capture.trial_runs import LSTM, WithoutOneDNN, without_packing

SETTINGS: dict[str, dict[str, Any]] = {
    "two layers": {"num_layers": 2},
    "both ways": {"num_layers": 2, "bidirectional": True},
    "without biases": {"bias": False},
    "batch first": {"batch_first": True},
}


@torch.no_grad()
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_the_results_of_torch(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    lstm, x = nn.LSTM(6, 5, **settings).eval(), torch.randn(4, 4, 6)
    rows = lstm.num_layers * (2 if lstm.bidirectional else 1)
    state = torch.randn(rows, 4, 5), torch.randn(rows, 4, 5)
    calls = [(x, state), (x,), (x[0],)]
    by_graph = (x, list(state), lstm._flat_weights, lstm.bias, lstm.num_layers, 0.0, False)
    ways = (lstm.bidirectional, lstm.batch_first)
    expected = [*(lstm(*call) for call in calls), LSTM(*by_graph, *ways)]
    with WithoutOneDNN():
        results = [*(lstm(*call) for call in calls), LSTM(*by_graph, *ways)]
    torch.testing.assert_close(results, expected, rtol=1e-5, atol=1e-6)
    # Sums in another order show that it was not oneDNN's kernel.
    assert not all(torch.equal(one[0], other[0]) for one, other in zip(results, expected, strict=True))


@torch.no_grad()
def test_whatever_the_form_of_the_call() -> None:
    torch.manual_seed(0)
    x, packed = torch.randn(4, 3, 6), pack_padded_sequence(torch.randn(4, 3, 6), torch.tensor([4, 2, 1]))
    projected, training = nn.LSTM(6, 5, proj_size=2).eval(), nn.LSTM(6, 5, 2, dropout=0.5).train()
    double = nn.LSTM(6, 5).double()
    for lstm, given in ((projected, x), (nn.LSTM(6, 5), packed), (training, x), (double, x.double())):
        results = []
        for mode in (nullcontext(), WithoutOneDNN()):
            torch.manual_seed(1)
            with mode:
                results.append(lstm(given))
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)
    assert torch._C._get_mkldnn_enabled()


def test_only_for_models_with_large_ones() -> None:
    small, large = nn.LSTM(8, 8), nn.Sequential(nn.LSTM(1024, 512))
    assert isinstance(without_packing(small, nn.Linear(2048, 2048)), nullcontext)
    assert isinstance(without_packing(small, large), WithoutOneDNN)
