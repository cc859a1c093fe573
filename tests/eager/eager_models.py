"""Small nets with stubs, in the shapes of the public ones, and eager mode beside ours."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.ao.quantization as legacy
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.nn.quantized import FloatFunctional
from torch.ao.quantization import DeQuantStub, QuantStub

from torchq_compat import quantize_eager


class ConvBNReLU(nn.Sequential):
    def __init__(self, inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> None:
        conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
        super().__init__(conv, nn.BatchNorm2d(outputs), nn.ReLU())


class InvertedResidual(nn.Module):
    """The block of MobileNetV2, as the static tutorial writes it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            ConvBNReLU(channels, 2 * channels, 1),
            ConvBNReLU(2 * channels, 2 * channels, groups=2 * channels),
            nn.Conv2d(2 * channels, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.skip_add = FloatFunctional()

    def forward(self, x: Tensor) -> Tensor:
        return self.skip_add.add(x, self.conv(x))  # type: ignore[no-any-return]


class MobileNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.features = nn.Sequential(ConvBNReLU(3, 8, stride=2), InvertedResidual(8), InvertedResidual(8))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(self.quant(x)).mean([2, 3])
        return self.dequant(self.classifier(x))  # type: ignore[no-any-return]

    def chains(self) -> list[list[str]]:
        found = [["features.0.0", "features.0.1", "features.0.2"]]
        for block in (1, 2):
            found += [[f"features.{block}.conv.{part}.{k}" for k in range(3)] for part in (0, 1)]
            found += [[f"features.{block}.conv.2", f"features.{block}.conv.3"]]
        return found


class ResNet(nn.Module):
    """A residual block with add_relu, an adaptive pool and a flatten between the stubs."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(2)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.add_relu = FloatFunctional()
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(self.quant(x)))))
        x = self.add_relu.add_relu(self.bn2(self.conv2(x)), x)
        return self.dequant(self.fc(torch.flatten(self.avgpool(x), 1)))  # type: ignore[no-any-return]

    def chains(self) -> list[list[str]]:
        return [["conv1", "bn1", "relu"], ["conv2", "bn2"]]


class GoogLeNet(nn.Module):
    """An inception with cat, and an auxiliary result in training."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.stem = ConvBNReLU(3, 6)
        self.left, self.right = ConvBNReLU(6, 4, 1), ConvBNReLU(6, 4)
        self.cat = FloatFunctional()
        self.aux, self.fc = nn.Linear(8, 6), nn.Linear(8, 6)
        self.aux.qconfig = None  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Any:
        x = self.stem(self.quant(x))
        pooled = F.max_pool2d(x, 3, stride=1, padding=1)
        x = self.cat.cat([self.left(x), self.right(pooled)], 1)
        x = F.adaptive_avg_pool2d(x, 1).reshape(x.shape[0], -1)
        result = self.dequant(self.fc(x))
        return (result, self.dequant(self.aux(x))) if self.training else result

    def chains(self) -> list[list[str]]:
        return [[f"{name}.{k}" for k in range(3)] for name in ("stem", "left", "right")]


class ShuffleNet(nn.Module):
    """Channels split, concatenated and shuffled by user code."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.stem, self.branch = ConvBNReLU(3, 8), ConvBNReLU(4, 4, groups=4)
        self.cat, self.fc = FloatFunctional(), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        kept, changed = self.stem(self.quant(x)).chunk(2, dim=1)
        x = self.cat.cat((kept, self.branch(changed)), dim=1)
        batch, channels, height, width = x.size()
        x = x.view(batch, 2, channels // 2, height, width).transpose(1, 2).contiguous()
        x = x.view(batch, -1, height, width).mean([2, 3])
        return self.dequant(self.fc(x))  # type: ignore[no-any-return]

    def chains(self) -> list[list[str]]:
        return [[f"{name}.{k}" for k in range(3)] for name in ("stem", "branch")]


NETS: tuple[Callable[[], Any], ...] = (MobileNet, ResNet, GoogLeNet, ShuffleNet)


def sane(model: nn.Module) -> nn.Module:
    """Give the batch norms of ``model`` statistics as after training."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)  # type: ignore[union-attr]
            module.running_var.uniform_(0.5, 1.5)  # type: ignore[union-attr]
            module.weight.data.uniform_(0.5, 1.5)
    return model


def both(flow: Callable[[Any, nn.Module], Any], model: nn.Module) -> tuple[Any, Any]:
    """Return what ``flow`` makes of copies of ``model`` with torch.ao's functions, and with ours."""
    results = []
    for functions in (legacy, quantize_eager):
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(7)
            results.append(flow(functions, copy.deepcopy(model)))
    return results[0], results[1]


def images(count: int = 3) -> list[Tensor]:
    return [torch.randn(4, 3, 12, 12) for _ in range(count)]


def calibrated(functions: Any, model: nn.Module, batches: Sequence[Any], **options: Any) -> nn.Module:
    prepared: nn.Module = functions.prepare(model, **options)
    for batch in batches:
        prepared(batch)
    return prepared
