"""fuse_fx beside FX's."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.ao.quantization.quantize_fx as fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.ao.quantization.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    get_native_backend_config,
)

import torchq_compat as tc
from tests.helpers.oracle import sqnr
from torchq_compat.errors import ConfigError, InputError


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


def folded_in_front(is_qat: bool, norm: nn.BatchNorm2d, conv: nn.Conv2d) -> nn.Conv2d:
    assert not is_qat
    assert norm.running_var is not None
    assert norm.running_mean is not None
    assert conv.bias is not None
    folded = copy.deepcopy(conv)
    scale = norm.weight / torch.sqrt(norm.running_var + norm.eps)
    shift = norm.bias - norm.running_mean * scale
    folded.weight = nn.Parameter(conv.weight * scale[None, :, None, None])
    folded.bias = nn.Parameter(conv.bias + (conv.weight.sum((2, 3)) * shift).sum(1))
    return folded


def in_one(is_qat: bool, *modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(*modules)


def backend_of(**patterns: tuple[tuple[type[nn.Module], ...], object]) -> BackendConfig:
    rows = [BackendPatternConfig(kinds).set_fuser_method(method) for kinds, method in patterns.values()]
    return BackendConfig("own").set_backend_pattern_configs(rows)


class NormFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn, self.conv, self.relu = nn.BatchNorm2d(3), nn.Conv2d(3, 4, 1), nn.ReLU()
        self.out, self.last = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.out(F.relu(self.relu(self.conv(self.bn(x))))))


@pytest.mark.parametrize(
    ("backend", "kinds"),
    [
        (get_native_backend_config(), {"conv": "ConvReLU2d", "out": "Conv2d", "bn": "BatchNorm2d"}),
        (
            backend_of(a=((nn.BatchNorm2d, nn.Conv2d), folded_in_front)),
            {"bn": "Conv2d", "last": "BatchNorm2d"},
        ),
        (
            backend_of(
                a=((nn.BatchNorm2d, nn.Conv2d), folded_in_front),
                b=((nn.BatchNorm2d, nn.Conv2d, nn.ReLU), in_one),
                c=((nn.Conv2d, nn.BatchNorm2d), in_one),
            ),
            {"bn": "Sequential", "out": "Sequential"},
        ),
    ],
)
def test_the_patterns_of_a_backend_config(backend: BackendConfig, kinds: dict[str, str]) -> None:
    torch.manual_seed(0)
    model, x = NormFirst(), torch.randn(8, 3, 5, 5)
    model(x)
    model.eval()
    theirs = fx.fuse_fx(copy.deepcopy(model), backend_config=backend)
    ours = tc.fuse_fx(model, backend_config=backend)
    assert structure(ours) == structure(theirs)
    assert kinds.items() <= structure(ours).items()
    with torch.no_grad():
        assert torch.allclose(ours(x), model(x), atol=1e-5)


def test_a_fuser_method_that_fails() -> None:
    def fails(is_qat: bool, *modules: nn.Module) -> nn.Module:
        raise ValueError("no such fusion")

    def gives_none(is_qat: bool, *modules: nn.Module) -> None:
        return None

    model = NormFirst().eval()
    with pytest.raises(ConfigError, match="the fuser method fails fails at 'bn': ValueError: no such fusion"):
        tc.fuse_fx(model, backend_config=backend_of(a=((nn.BatchNorm2d, nn.Conv2d), fails)))
    with pytest.raises(ConfigError, match=r"the result of a fuser method .* NoneType"):
        tc.fuse_fx(model, backend_config=backend_of(a=((nn.BatchNorm2d, nn.Conv2d), gives_none)))
