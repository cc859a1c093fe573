"""torch.compile of converted models with recurrent modules: no graph breaks, no flags, any length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.utils
import torch._inductor.config
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig_mapping

import torchq_compat as tc
from tests.helpers.lstm_flow import uniform
from tests.helpers.oracle import calibrate, leaves, sqnr
from tests.helpers.recording_backend import Recorder

RECURRENT = torch.ops.torchq_compat_native.recurrent.default


class Stacked(nn.Module):
    """Two recurrent modules, one feeding the other, a cell at the end, and the whole state returned."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(6, 10)
        self.first = nn.LSTM(10, 8, 2)
        self.second = nn.GRU(8, 12, bidirectional=True)
        self.cell = nn.RNNCell(24, 7)

    def forward(self, x: Tensor) -> Any:
        first, state = self.first(self.inputs(x))
        second, _ = self.second(first)
        return second, state, self.cell(second[-1])


@pytest.fixture(scope="module")
def prepared() -> torch.fx.GraphModule:
    torch.manual_seed(0)
    prepared = tc.prepare_fx(
        Stacked().eval(),
        get_default_qconfig_mapping(),
        (uniform(2.0, 9, 4, 6),),
        tc.get_default_prepare_custom_config(),
    )
    calibrate(prepared, [(uniform(2.0, 9, 4, 6),) for _ in range(4)])
    return prepared


@pytest.fixture(autouse=True)
def _forget_what_was_compiled() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "convert", [tc.convert_fx, pytest.param(tc.convert_to_reference_fx, marks=pytest.mark.slow)]
)
def test_one_graph_with_a_call_for_each_module(convert: Any, prepared: torch.fx.GraphModule) -> None:
    model = convert(prepared)
    backend = Recorder()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        for steps, batch in ((9, 4), (23, 2), (31, 3)):
            x = uniform(2.0, steps, batch, 6)
            for expected, found in zip(leaves(model(x)), leaves(compiled(x)), strict=True):
                assert sqnr(expected, found) > 40
    assert backend.calls(RECURRENT) == 3
    # The second length made the sizes dynamic; the third needed no new graph.
    assert len(backend.graphs) == 2


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0])


def test_the_default_backend() -> None:
    torch.manual_seed(0)
    x = uniform(2.0, 4, 9, 6)
    config = tc.get_default_prepare_custom_config()
    prepared = tc.prepare_fx(Tagger().eval(), get_default_qconfig_mapping(), (x,), config)
    calibrate(prepared, [(x,)])
    lowered = tc.convert_fx(prepared)
    compiled = torch.compile(lowered)
    torch._dynamo.utils.counters.clear()
    # Whether g++ knows the vectors of this machine is not tried out, which takes as long as the kernels.
    with torch.no_grad(), torch._inductor.config.patch({"cpp.vec_isa_ok": True}):
        for batch, steps in ((4, 9), (2, 23)):
            x = uniform(2.0, batch, steps, 6)
            assert sqnr(lowered.reference(x), compiled(x)) > 40
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.slow
def test_new_qparams_reach_a_compiled_model(prepared: torch.fx.GraphModule) -> None:
    model = tc.convert_fx(prepared)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    x = uniform(2.0, 9, 4, 6)
    with torch.no_grad():
        before = leaves(compiled(x))
        torch.manual_seed(1)
        other = tc.prepare_fx(
            Stacked().eval(), get_default_qconfig_mapping(), (x,), tc.get_default_prepare_custom_config()
        )
        calibrate(other, [(uniform(3.0, 9, 4, 6),)])
        model.load_state_dict(tc.convert_fx(other).state_dict())
        after = leaves(compiled(x))
    for expected, old, new in zip(leaves(model(x)), before, after, strict=True):
        assert sqnr(expected, new) > 40
        assert sqnr(expected, old) < 10
