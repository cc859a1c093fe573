"""ExecuTorch's own Quantizer, for models with recurrent modules that stay float."""

from __future__ import annotations

import pytest
import torch
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
    XNNPACKQuantizer,
    get_symmetric_quantization_config,
)
from torch import Tensor, nn

import torchq_compat as tc
from tests.helpers.oracle import calibrate, quantize_nodes, sqnr


class Tagger(nn.Module):
    def __init__(self, recurrent: type[nn.Module]) -> None:
        super().__init__()
        self.inp, self.recurrent, self.out = nn.Linear(6, 6), recurrent(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        found = self.recurrent(self.inp(x))
        return self.out(found[0] if isinstance(found, tuple) else found)


@pytest.mark.parametrize(
    "recurrent",
    [
        pytest.param(nn.LSTM, marks=pytest.mark.slow),
        nn.GRU,
        pytest.param(nn.RNN, marks=pytest.mark.slow),
        nn.GRUCell,
    ],
)
def test_the_layers_around_are_quantized_at_any_size(recurrent: type[nn.Module]) -> None:
    """For the exported module itself the quantizer raises an IndexError with nn.GRU."""
    torch.manual_seed(0)
    model = Tagger(recurrent).eval()
    is_cell = issubclass(recurrent, nn.RNNCellBase)
    x, other = (torch.randn(*(9, 6) if is_cell else (steps, 9, 6)) for steps in (7, 11))
    quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config())
    with pytest.warns(UserWarning, match=f"{recurrent.__name__} at 'recurrent' stays float"):
        prepared = tc.prepare_fx(model, quantizer, (x,))
    calibrate(prepared, [(x,), (other,)])
    converted = tc.convert_to_reference_fx(prepared)
    assert len(quantize_nodes(converted)) >= 4
    for given in (x, other):
        assert 25 < sqnr(model(given), converted(given)) < 60
