"""Models that are moved, to another device or dtype: the meta device stands for one that is not here."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig_mapping

import torchq_compat as tc
from tests.helpers.oracle import sqnr
from torchq_compat.capture.trial_runs import run_prepared


class MakesTensors(nn.Module):
    """Makes tensors beside its input, in its graph and in the step of a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.cell, self.fc = nn.Embedding(40, 6), nn.LSTMCell(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.table(torch.arange(x.shape[0], device=x.device))[:, None]
        state = torch.zeros(x.shape[1], 8, device=x.device), x.new_zeros(x.shape[1], 8)
        for step in range(x.shape[0]):
            state = self.cell(x[step], state)
        mask = torch.tril(torch.ones(8, 8, device=x.device))
        result: Tensor = self.fc(state[0] @ mask)
        return result


def test_what_a_graph_makes_is_made_where_its_state_is() -> None:
    """torch.export writes ``x.device`` as a constant; there and back, the results are those of before."""
    x = torch.randn(7, 3, 6)
    prepared = tc.prepare_fx(
        MakesTensors(), get_default_qconfig_mapping("x86"), (x,), tc.get_default_prepare_custom_config()
    )
    prepared(x)
    for model in (tc.convert_to_reference_fx(prepared), tc.convert_fx(prepared)):
        moved = copy.deepcopy(model).to("meta")
        devices = {
            value
            for module in moved.modules()
            if isinstance(module, torch.fx.GraphModule)
            for node in module.graph.nodes
            for value in (*node.args, *node.kwargs.values())
            if isinstance(value, torch.device)
        }
        assert devices <= {torch.device("meta")}
        assert moved(x.to("meta")).device.type == "meta"
        expected = model(x)
        assert torch.equal(model.to(torch.device("cpu"))(x), expected)


@pytest.mark.parametrize(
    "make", [lambda: nn.LSTM(4, 5, 2, bidirectional=True), lambda: nn.GRU(4, 5), lambda: nn.LSTMCell(4, 5)]
)
def test_prepared_recurrent_modules_run_in_float64(make: type[nn.Module]) -> None:
    """Trials do so where a difference may be rounding."""

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = make()

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.layer(x)[0]
            return result

    model, x = First().eval(), torch.randn(3, 4)
    prepared = tc.prepare_fx(
        model, get_default_qconfig_mapping("x86"), (x,), tc.get_default_prepare_custom_config()
    )
    wide = run_prepared(copy.deepcopy(prepared).double(), (x.double(),))
    assert wide.dtype is torch.float64
    assert sqnr(copy.deepcopy(model).double()(x.double()), wide) > 250
