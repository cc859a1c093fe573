"""Graphs passed to torchao's prepare are accepted by later torchao versions too."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import get_default_qat_qconfig_mapping, get_default_qconfig_mapping
from torch.fx import GraphModule

import torchq_compat as tc
from torchq_compat.support import process_state

#: torchao after 0.18 refuses a graph with one of them: https://github.com/pytorch/ao/pull/4861
REFUSED = (torch.ops.higher_order.wrap_with_set_grad_enabled, torch.ops.higher_order.wrap_with_autocast)


class Blocks(nn.Module):
    """Ops under ``torch.no_grad``, nested, beside a recurrent module."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(8, 4)
        self.lstm = nn.LSTM(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.a(x)
            with torch.enable_grad():
                x = torch.relu(self.b(x))
            y, _ = self.lstm(x)
        return self.c(y)


def refusing(prepare: Callable[..., Any], seen: list[GraphModule]) -> Callable[..., Any]:
    """torchao's ``prepare``, with the check of the release after 0.18."""

    def checked(model: GraphModule, quantizer: Any) -> Any:
        for module in model.modules():
            if isinstance(module, GraphModule):
                assert not [node for node in module.graph.nodes if node.target in REFUSED]
        seen.append(model)
        return prepare(model, quantizer)

    return checked


@pytest.mark.parametrize("is_qat", [False, True])
def test_no_block_is_left_in_a_graph(is_qat: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[GraphModule] = []
    for name in ("prepare_pt2e", "prepare_qat_pt2e"):
        monkeypatch.setattr(process_state.flow, name, refusing(getattr(process_state.flow, name), seen))
    torch.manual_seed(0)
    model, x = Blocks().train(is_qat), torch.randn(5, 3, 6)
    exported = torch.export.export(model, (x,)).module(check_guards=False)
    assert any(node.target in REFUSED for node in exported.graph.nodes)
    mapping = (get_default_qat_qconfig_mapping if is_qat else get_default_qconfig_mapping)("qnnpack")
    prepare = tc.prepare_qat_fx if is_qat else tc.prepare_fx
    # In evaluation nobody needs gradients; in training they flow through the ops under no_grad, as in FX.
    told = pytest.warns(tc.QuantizationWarning, match="no_grad") if is_qat else nullcontext()
    with told:
        prepared = prepare(model, mapping, (x,), tc.get_default_prepare_custom_config())
    assert len(seen) == 2  # the model, and the cell of the LSTM
    prepared(x)
    quantized = {d.path for d in tc.explain(prepared) if d.action in ("quantized", "shared")}
    assert {"a", "b", "c"} <= quantized
