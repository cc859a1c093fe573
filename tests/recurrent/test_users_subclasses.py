"""A subclass of a recurrent class with a forward of its own is user code: one float call, as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.ao.quantization.fx.custom_config import PrepareCustomConfig

import torchq_compat as tc
from torchq_compat.errors import CustomModuleError, QuantizationWarning
from torchq_compat.nn.quantizable import GRU
from torchq_compat.support.decisions import Action

MAPPING = get_default_qconfig_mapping("x86")


class MaskedGRU(nn.GRU):
    """Returns another thing than its base, and takes more."""

    def forward(self, x: Tensor, hx: Any = None, mask: Any = None, *, scale: float = 1.0) -> Tensor:
        y, h = super().forward(x, hx)
        return (y if mask is None else y * mask) * scale + h.transpose(0, 1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = MaskedGRU(6, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.out(self.rnn(x, mask=mask, scale=0.5))


def inputs(steps: int, batch: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, steps, 6), torch.rand(batch, steps, 1).round()


def prepared_net(config: PrepareCustomConfig | None) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = Net().eval()
    return model, tc.prepare_fx(model, MAPPING, inputs(5, 2), prepare_custom_config=config)


@pytest.mark.parametrize("config", [None, tc.get_default_prepare_custom_config()], ids=["none", "default"])
def test_it_is_one_float_call(config: PrepareCustomConfig | None) -> None:
    with pytest.warns(QuantizationWarning, match="MaskedGRU has a forward of its own"):
        model, prepared = prepared_net(config)
    [decision] = [each for each in tc.explain(prepared) if each.path == "rnn"]
    assert decision.action is Action.FLOAT
    for steps, batch in ((9, 3), (1, 1), (30, 2)):
        args = inputs(steps, batch)
        x, mask = args
        torch.testing.assert_close(prepared.rnn(x, mask=mask), model.rnn(x, mask=mask))
        prepared(*args)
    converted, args = tc.convert_fx(prepared), inputs(17, 4)
    torch.testing.assert_close(converted(*args), model(*args), atol=0.05, rtol=0.0)


def test_a_class_that_is_mapped_takes_what_its_observed_class_takes() -> None:
    config = PrepareCustomConfig().set_float_to_observed_mapping(MaskedGRU, GRU)
    with pytest.raises(CustomModuleError, match="'rnn' is not valid: unexpected or repeated argument"):
        prepared_net(config)
