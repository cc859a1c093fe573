"""torchao's own lowering for x86 takes programs of ``export``: every convolution and linear in integers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig_mapping
from torchao.quantization.pt2e.lowering import lower_pt2e_quantized_to_x86

import torchq_compat as tc
from tests.helpers.oracle import calibrate, sqnr

ONEDNN = ("onednn.qconv_pointwise.default", "onednn.qlinear_pointwise.default")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.second, self.out = nn.Conv2d(16, 16, 3, padding=1), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.first(x)))
        y = torch.relu(y + self.second(y))
        tags: Tensor = self.out(y.mean((2, 3)))
        return tags


@pytest.mark.parametrize("qconfigs", ["x86", "onednn"])
def test_every_layer_in_integers(qconfigs: str) -> None:
    model, x = Block().eval(), torch.rand(2, 3, 12, 12)
    prepared = tc.prepare_fx(model, get_default_qconfig_mapping(qconfigs), (x,))
    # Integers in the lower half of their range: without VNNI oneDNN saturates products of larger ones.
    calibrate(prepared, [(2 * torch.rand(16, 3, 12, 12),), (x,)])
    reference = tc.convert_to_reference_fx(prepared)
    lowered = lower_pt2e_quantized_to_x86(tc.export(reference, (x,)).module(), (x,))
    called = [str(node.target) for node in lowered.graph.nodes if str(node.target) in ONEDNN]
    assert len(called) == 3
    with torch.no_grad():
        assert 15 < sqnr(model(x), lowered(x)) < 60
        assert sqnr(reference(x), lowered(x)) > 35
