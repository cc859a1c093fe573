"""ExecuTorch's own Quantizer, for models with recurrent modules that stay float."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import torchq_compat as tc
from tests.helpers.oracle import calibrate, nodes_of_each_result, quantize_nodes, sqnr
from tests.helpers.xnnpack import xnnpack_quantizer
from torchq_compat.errors import QuantizationWarning


class Tagger(nn.Module):
    def __init__(self, recurrent: type[nn.Module]) -> None:
        super().__init__()
        self.inp, self.recurrent, self.out = nn.Linear(6, 6), recurrent(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        found = self.recurrent(self.inp(x))
        return self.out(found[0] if isinstance(found, tuple) else found)


class Taggers(nn.Module):
    """Taggers side by side, each with an input and a result of its own."""

    def __init__(self, kinds: list[type[nn.Module]]) -> None:
        super().__init__()
        self.taggers = nn.ModuleDict({kind.__name__: Tagger(kind) for kind in kinds})

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        return [tagger(x) for tagger, x in zip(self.taggers.values(), inputs, strict=True)]


@pytest.mark.parametrize(
    "kinds",
    [pytest.param([nn.LSTM, nn.RNN], marks=pytest.mark.slow), [nn.GRU, nn.GRUCell]],
    ids=["lstm and rnn", "gru and its cell"],
)
def test_the_layers_around_are_quantized_at_any_size(kinds: list[type[nn.Module]]) -> None:
    """For the exported module itself the quantizer raises an IndexError with nn.GRU."""
    torch.manual_seed(0)
    model = Taggers(kinds).eval()
    x, other = (
        [torch.randn(*(9, 6) if issubclass(kind, nn.RNNCellBase) else (steps, 9, 6)) for kind in kinds]
        for steps in (7, 11)
    )
    with pytest.warns(QuantizationWarning) as told:
        prepared = tc.prepare_fx(model, xnnpack_quantizer(), (x,))
    for name in model.taggers:
        assert any(f"{name} at 'taggers.{name}.recurrent' stays float" in str(each.message) for each in told)
    calibrate(prepared, [(x,), (other,)])
    converted = tc.convert_to_reference_fx(prepared)
    quantizes = set(quantize_nodes(converted))
    assert [len(quantizes & nodes) >= 4 for nodes in nodes_of_each_result(converted)] == [True, True]
    for given in (x, other):
        for exact, found in zip(model(given), converted(given), strict=True):
            assert 25 < sqnr(exact, found) < 60
