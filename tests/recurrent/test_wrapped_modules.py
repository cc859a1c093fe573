"""Subclasses and wrappers of recurrent modules, and one cell in two loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.nn.utils import parametrizations

import torchq_compat as tc
from tests.helpers.oracle import calibrate, leaves, sqnr
from tests.helpers.packed_models import map_all
from torchq_compat.errors import QuantizationWarning
from torchq_compat.nn import quantizable
from torchq_compat.support.decisions import Action

MAPPING = get_default_qconfig_mapping("x86")


class Named(nn.LSTM):
    """A subclass that computes the same as its base."""

    def __init__(self) -> None:
        super().__init__(6, 8, batch_first=True)
        self.label = "named"


class OfItsOwn(nn.LSTM):
    def forward(self, x: Tensor, hx: Any = None) -> Any:  # type: ignore[override]
        return super().forward(x * 2, hx)


class Dropping(nn.Module):
    """Weight drop, as in AWD-LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.LSTM(6, 8, batch_first=True)
        raw = self.module.weight_hh_l0
        self.raw = nn.Parameter(raw.detach().clone())
        del self.module._parameters["weight_hh_l0"]
        self.module.weight_hh_l0 = self.raw.detach().clone()

    def forward(self, x: Tensor) -> Any:
        self.module.weight_hh_l0 = F.dropout(self.raw, 0.5, self.training)
        return self.module(x)


class Assigning(Dropping):
    """The same with a parameter itself, which dropout in eval mode returns with torch 2.15."""

    def forward(self, x: Tensor) -> Any:
        self.module.weight_hh_l0 = self.raw
        return self.module(x)


def parametrized() -> nn.Module:
    return parametrizations.weight_norm(nn.LSTM(6, 8, batch_first=True), "weight_hh_l0")


def normed() -> nn.Module:
    return torch.nn.utils.weight_norm(nn.LSTM(6, 8, batch_first=True), "weight_hh_l0")


class Flattens(nn.Module):
    def __init__(self, rnn: nn.Module) -> None:
        super().__init__()
        self.rnns = nn.ModuleList([rnn])
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        for rnn in self.rnns:
            if hasattr(rnn, "flatten_parameters"):
                rnn.flatten_parameters()
            x, _ = rnn(x)
        return self.fc(x)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:hooks of LSTM")
@pytest.mark.parametrize(
    "make", [Named, parametrized, normed, Dropping, Assigning, lambda: nn.LSTM(6, 8, batch_first=True)]
)
def test_what_computes_like_its_base_is_mapped(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = Flattens(make()).eval()
    prepared = tc.prepare_fx(model, MAPPING, (torch.randn(3, 5, 6),), map_all())
    calibrate(prepared, [(torch.randn(4, 7, 6),) for _ in range(4)])
    converted = tc.convert_to_reference_fx(prepared)
    x = torch.randn(2, 9, 6)
    assert 25 < sqnr(model(x), converted(x)) < 60
    kinds = {type(module).__name__ for module in converted.modules()}
    assert "ConvertedLSTM" in kinds
    assert "LSTM" not in kinds
    assert any(value.dtype is torch.int8 for name, value in converted.state_dict().items() if "rnns" in name)


def test_a_forward_of_its_own_is_said_with_the_class_to_map() -> None:
    torch.manual_seed(0)
    model = Flattens(OfItsOwn(6, 8, batch_first=True)).eval()
    with pytest.warns(QuantizationWarning, match=r"OfItsOwn has a forward.*mapping\(OfItsOwn, "):
        prepared = tc.prepare_fx(model, MAPPING, (torch.randn(3, 5, 6),), map_all())
    assert tc.explain(prepared).find("rnns.0")[0].action is Action.FLOAT
    calibrate(prepared, [(torch.randn(4, 7, 6),)])
    x = torch.randn(2, 9, 6)
    assert sqnr(model(x), tc.convert_to_reference_fx(prepared)(x)) > 25


def test_one_cell_in_two_loops() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(6, 8)

        def forward(self, x: Tensor, y: Tensor) -> Any:
            h = x.new_zeros(x.size(1), 8)
            g = torch.tanh(x[0, :, :1]).expand(-1, 8)
            for step in range(3):
                h, g = self.cell(x[step], h), self.cell(y[2 - step], g)
            return h, g

    torch.manual_seed(0)
    model = Both().eval()
    mapped = map_all().set_float_to_observed_mapping(nn.GRUCell, quantizable.GRUCell)
    prepared = tc.prepare_fx(model, MAPPING, (torch.randn(3, 4, 6), torch.randn(3, 4, 6)), mapped)
    calibrate(prepared, [(torch.randn(3, 8, 6), torch.randn(3, 8, 6)) for _ in range(4)])
    converted = tc.convert_to_reference_fx(prepared)
    given = torch.randn(3, 5, 6), torch.randn(3, 5, 6)
    assert all(
        25 < sqnr(a, b) < 60 for a, b in zip(leaves(model(*given)), leaves(converted(*given)), strict=True)
    )
    assert [path for path, _ in converted.named_modules() if path.endswith(".cell") or path == "cell"] == [
        "cell",
        "cell.cell",
    ]
