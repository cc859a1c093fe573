"""fuse_fx beside FX's."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.ao.quantization.quantize_fx as fx
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig_mapping

import torchq_compat as tc
from tests.helpers.oracle import sqnr
from torchq_compat.errors import InputError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vocabulary = ["a"]
        self.conv1 = nn.Conv2d(3, 8, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU()
        self.block = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8))
        self.conv2 = nn.Conv2d(8, 8, 1)
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.block(x) + x
        x = torch.relu(self.conv2(x)).mean((2, 3))
        return self.fc(x).relu()


def structure(model: nn.Module) -> dict[str, str]:
    return {path: type(module).__name__ for path, module in model.named_modules() if path}


def test_as_fx_fuses() -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(4, 3, 9, 9)
    model(x)
    model.eval()
    before = structure(model)
    theirs = fx.fuse_fx(copy.deepcopy(model))
    ours = tc.fuse_fx(model, {"preserved_attributes": ["vocabulary"]})
    assert isinstance(ours, torch.fx.GraphModule)
    assert structure(ours) == structure(theirs)
    assert ours.vocabulary == ["a"]
    assert structure(model) == before
    with torch.no_grad():
        assert torch.allclose(ours(x), theirs(x), atol=1e-6)
    quantized = []
    for start in (ours, model):
        prepared = tc.prepare_fx(start, get_default_qconfig_mapping("x86"), (x,))
        prepared(x)
        quantized.append(tc.convert_fx(prepared)(x))
    with torch.no_grad():
        assert 25 < sqnr(model(x), quantized[0]) < 60
        assert sqnr(quantized[1], quantized[0]) > 40


def test_training() -> None:
    with pytest.raises(InputError, match="'bn1', which is in training mode"):
        tc.fuse_fx(Net().train())
    fused = tc.fuse_fx(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).train())
    assert structure(fused) == {"0": "LinearReLU", "0.0": "Linear", "0.1": "ReLU"}
    assert fused.training


def test_what_cannot_be_traced_is_returned_with_a_warning() -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    model = Branches().eval()
    with pytest.warns(UserWarning, match="torch.fx cannot trace Branches"):
        assert tc.fuse_fx(model) is model
