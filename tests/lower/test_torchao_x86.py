"""torchao's own lowering for x86 takes programs of ``export``: every convolution and linear in integers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.ao.quantization import QConfigMapping, get_default_qconfig
from torchao.quantization.pt2e.lowering import lower_pt2e_quantized_to_x86

import torchq_compat as tc
from tests.helpers.oracle import calibrate, sqnr
from tests.helpers.side_by_side import side_by_side

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


def test_every_layer_in_integers() -> None:
    """A block with each of two qconfigs."""
    names = ("x86", "onednn")
    model = side_by_side([Block().eval() for _ in names], [[0], [1]])
    mapping = QConfigMapping()
    for index, name in enumerate(names):
        mapping.set_module_name(str(index), get_default_qconfig(name))
    given = tuple(torch.rand(2, 3, 12, 12) for _ in names)
    prepared = tc.prepare_fx(model, mapping, given)
    # Integers in the lower half of their range: without VNNI oneDNN saturates products of larger ones.
    calibrate(prepared, [tuple(2 * torch.rand(16, 3, 12, 12) for _ in names), given])
    reference = tc.convert_to_reference_fx(prepared)
    lowered = lower_pt2e_quantized_to_x86(tc.export(reference, given).module(), given)
    called = [str(node.target) for node in lowered.graph.nodes if str(node.target) in ONEDNN]
    assert len(called) == 3 * len(names)
    with torch.no_grad():
        results = zip(names, model(*given), reference(*given), lowered(*given), strict=True)
    for name, exact, expected, found in results:
        assert 15 < sqnr(exact, found) < 60, name
        assert sqnr(expected, found) > 35, name
