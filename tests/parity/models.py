"""The models of the parity corpus, each with the shapes of its inputs: small, and of the kinds that legacy FX
scripts quantize."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["MODELS", "ModelEntry"]


class BasicBlock(nn.Module):
    def __init__(self, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = (
            nn.Sequential(nn.Conv2d(width, width, 1, stride, bias=False), nn.BatchNorm2d(width))
            if stride > 1
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """torchvision's ResNet, reduced: stem, two basic blocks, pooled head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, 2, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(BasicBlock(8), BasicBlock(8, 2))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.fc(torch.flatten(self.avgpool(self.layer1(x)), 1))


class InvertedResidual(nn.Module):
    """The block of MobileNetV2, with the ReLU6 of its reference script."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Sequential(nn.Conv2d(4, 12, 1, bias=False), nn.BatchNorm2d(12), nn.ReLU6(inplace=True)),
            nn.Sequential(
                nn.Conv2d(12, 12, 3, 1, 1, groups=12, bias=False), nn.BatchNorm2d(12), nn.ReLU6(inplace=True)
            ),
            nn.Conv2d(12, 4, 1, bias=False),
            nn.BatchNorm2d(4),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x)


class SqueezeExcite(nn.Module):
    """MobileNetV3's block: a pooled gate with hardsigmoid, and hardswish behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Conv2d(8, 4, 1)
        self.fc2 = nn.Conv2d(4, 8, 1)
        self.act = nn.Hardswish()

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.conv(x))
        gate = F.hardsigmoid(self.fc2(F.relu(self.fc1(self.pool(x)))))
        return gate * x


class Inception(nn.Module):
    """Branches that are concatenated, as in GoogLeNet."""

    def __init__(self) -> None:
        super().__init__()
        self.branch1 = nn.Conv2d(3, 4, 1)
        self.branch2 = nn.Sequential(nn.Conv2d(3, 2, 1), nn.ReLU(), nn.Conv2d(2, 4, 3, padding=1))
        self.pool = nn.AvgPool2d(3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([self.branch1(x), self.branch2(x), self.pool(x)], 1)
        return F.max_pool2d(F.relu(y), 2)


class TransformerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.proj = nn.Linear(16, 16)
        self.norm1 = nn.LayerNorm(16)
        self.norm2 = nn.LayerNorm(16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        attention = torch.softmax(torch.matmul(q, k.transpose(-2, -1)) / 2.0, dim=-1)
        y = torch.matmul(attention, v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.proj(y)
        return x + self.mlp(self.norm2(x))


class EmbeddingBagClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(40, 16, mode="sum", include_last_offset=True)
        self.fc1 = nn.Linear(16, 16)
        self.fc2 = nn.Linear(16, 4)

    def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
        return self.fc2(F.relu(self.fc1(self.embedding(indices, offsets))))


class EmbeddingClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.fc = nn.Linear(16, 4)

    def forward(self, indices: Tensor) -> Tensor:
        return self.fc(self.embedding(indices).mean(1))


class ConvFront(nn.Module):
    """The convolutions in front of the recurrent layers of a CRNN, and its head."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 4, 3, 1, 1),
            nn.ReLU(True),
            nn.MaxPool2d(2, 2),
            nn.Conv2d(4, 8, 3, 1, 1),
            nn.BatchNorm2d(8),
            nn.ReLU(True),
            nn.MaxPool2d((2, 2), (2, 1), (0, 1)),
        )
        self.head = nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.features(x)
        y = y.permute(3, 0, 1, 2).flatten(2)
        return self.head(y)


class Functional(nn.Module):
    """Weights as parameters, ops as functions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 3, 3, 3) * 0.2)
        self.bias = nn.Parameter(torch.randn(8) * 0.1)
        self.fc_weight = nn.Parameter(torch.randn(4, 8) * 0.3)
        self.fc_bias = nn.Parameter(torch.randn(4) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(F.conv2d(x, self.weight, self.bias))
        return F.linear(F.adaptive_avg_pool2d(y, 1).flatten(1), self.fc_weight, self.fc_bias)


class Arithmetic(nn.Module):
    """Every spelling of add and mul that FX distinguishes."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x), self.b(x)
        y = torch.add(a, b) + operator.mul(a, b)
        y = F.relu(y * a)
        y = torch.relu(y + 2.0)
        y = torch.mul(y, 0.7)  # with the qparams of y: half of it would be a tie in every zero
        return y + y


class InplaceArithmetic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y += x
        y *= self.b(x)
        return F.relu(y, inplace=True)


class Shapes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 12)
        self.out = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x).transpose(0, 1)
        y = y.reshape(y.size(0), y.size(1), 3, 4).permute(1, 0, 2, 3).contiguous()
        a, b = torch.chunk(self.out(y.mean(2).unsqueeze(1)).squeeze(1), 2, 1)
        return torch.cat((a, b), 1).view(y.size(0), -1)


class Activations(nn.Module):
    """Activations with fixed qparams, and activations with their own observer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.acts = nn.ModuleList([nn.Sigmoid(), nn.Tanh(), nn.Hardsigmoid(), nn.Softmax(-1)])
        self.own = nn.ModuleList([nn.ELU(), nn.LeakyReLU(), nn.Hardswish(), nn.ReLU6(), nn.PReLU()])
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.fc(x)
        results = [act(y) for act in self.acts] + [self.out(own(y)) for own in self.own]
        return tuple(results)


class FunctionalActivations(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.fc(x)
        return (
            torch.sigmoid(y),
            y.sigmoid(),
            torch.tanh(y),
            F.hardsigmoid(y),
            F.elu(y),
            F.leaky_relu(y, 0.1),
            F.hardswish(y),
            F.relu6(y),
            F.hardtanh(y),
            y.clamp(-1, 1),
            torch.clamp(y, 0.0, 1.0),
        )


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)
        self.group = nn.GroupNorm(2, 4)
        self.instance = nn.InstanceNorm2d(4)
        self.layer = nn.LayerNorm(6)
        self.batch = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        y = self.layer(self.instance(self.group(y)))
        return F.relu(self.batch(y))


class ReusedModule(nn.Module):
    """One linear called twice, one ReLU called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.fc(x))
        z = self.relu(self.fc(y))
        return self.relu(y + z)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(8, 4)
        self.right = nn.Linear(8, 4)
        self.attributes_kept = "kept"

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        a, b = self.left(x), self.right(y)
        return {"sum": a + b, "stack": torch.cat([a, b], -1), "raw": x - y}


class Detector(nn.Module):
    """The structure of a d2go model: backbone, proposal head, ROI head, some of which are quantized."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 1)
        )
        self.rpn = nn.ModuleDict({"conv": nn.Conv2d(6, 6, 3, padding=1), "score": nn.Conv2d(6, 2, 1)})
        self.roi_heads = nn.Sequential(nn.Flatten(), nn.Linear(6 * 4 * 4, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.backbone(x)
        score = self.rpn["score"](F.relu(self.rpn["conv"](features)))
        return score, self.roi_heads(F.adaptive_max_pool2d(features, 4))


def chain(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A Sequential of fresh layers."""
    return lambda: nn.Sequential(*(layer() for layer in layers))


def conv(dimension: int, transposed: bool = False, **options: object) -> Callable[[], nn.Module]:
    name = f"Conv{'Transpose' if transposed else ''}{dimension}d"
    return lambda: getattr(nn, name)(3, 6, 3, **options)


def norm(dimension: int, features: int = 6) -> Callable[[], nn.Module]:
    return lambda: getattr(nn, f"BatchNorm{dimension}d")(features)


def linear() -> nn.Module:
    return nn.Linear(8, 6)


@dataclass(frozen=True)
class ModelEntry:
    """How to make a model and batches for it."""

    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, ...]]


#: Odd sizes for averages: the mean of an even number of integers is often half way between two integers,
#: which the quantize operators of FX and PT2E round differently.
def floats(*shapes: tuple[int, ...]) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: tuple(torch.randn(shape) for shape in shapes)


IMAGE = {1: (4, 3, 9), 2: (4, 3, 9, 9), 3: (2, 3, 5, 5, 5)}

MODELS: dict[str, ModelEntry] = {
    "resnet": ModelEntry(ResNet, floats((2, 3, 16, 16))),
    "inverted_residual": ModelEntry(InvertedResidual, floats((2, 4, 6, 6))),
    "squeeze_excite": ModelEntry(SqueezeExcite, floats((2, 4, 6, 6))),
    "inception": ModelEntry(Inception, floats((2, 3, 8, 8))),
    "transformer": ModelEntry(TransformerBlock, floats((2, 5, 16))),
    "embedding_bag": ModelEntry(
        EmbeddingBagClassifier, lambda: (torch.randint(0, 40, (12,)), torch.tensor([0, 3, 7, 12]))
    ),
    "embedding": ModelEntry(EmbeddingClassifier, lambda: (torch.randint(0, 40, (4, 7)),)),
    "conv_front": ModelEntry(ConvFront, floats((2, 1, 8, 12))),
    "functional": ModelEntry(Functional, floats((2, 3, 7, 7))),
    "arithmetic": ModelEntry(Arithmetic, floats((6, 8))),
    "inplace_arithmetic": ModelEntry(InplaceArithmetic, floats((6, 8))),
    "shapes": ModelEntry(Shapes, floats((6, 7, 16))),
    "activations": ModelEntry(Activations, floats((6, 8))),
    "functional_activations": ModelEntry(FunctionalActivations, floats((6, 8))),
    "norms": ModelEntry(Norms, floats((2, 4, 5, 6))),
    "reused_module": ModelEntry(ReusedModule, floats((6, 8))),
    "two_inputs": ModelEntry(TwoInputs, floats((6, 8), (6, 8))),
    "detector": ModelEntry(Detector, floats((2, 3, 8, 8))),
    **{f"conv{d}": ModelEntry(conv(d), floats(IMAGE[d])) for d in (1, 2, 3)},
    **{f"conv{d}_relu": ModelEntry(chain(conv(d), nn.ReLU), floats(IMAGE[d])) for d in (1, 2, 3)},
    **{f"conv{d}_bn": ModelEntry(chain(conv(d), norm(d)), floats(IMAGE[d])) for d in (1, 2, 3)},
    **{f"conv{d}_bn_relu": ModelEntry(chain(conv(d), norm(d), nn.ReLU), floats(IMAGE[d])) for d in (1, 2, 3)},
    **{f"conv_transpose{d}": ModelEntry(chain(conv(d, True)), floats(IMAGE[d])) for d in (1, 2, 3)},
    **{
        f"conv_transpose{d}_bn": ModelEntry(chain(conv(d, True), norm(d)), floats(IMAGE[d]))
        for d in (1, 2, 3)
    },
    "conv_transpose2_relu": ModelEntry(chain(conv(2, True), nn.ReLU), floats(IMAGE[2])),
    "conv2_circular": ModelEntry(conv(2, padding=1, padding_mode="circular"), floats(IMAGE[2])),
    "bn_relu": ModelEntry(chain(norm(2, 3), nn.ReLU), floats(IMAGE[2])),
    "bn3_relu": ModelEntry(chain(norm(3, 3), nn.ReLU), floats(IMAGE[3])),
    "linear_relu": ModelEntry(chain(linear, nn.ReLU), floats((6, 8))),
    "linear_bn": ModelEntry(chain(linear, norm(1)), floats((6, 8))),
    "linear_leaky_relu": ModelEntry(chain(linear, nn.LeakyReLU), floats((6, 8))),
    "linear_tanh": ModelEntry(chain(linear, nn.Tanh), floats((6, 8))),
    "linear_bn_leaky_relu": ModelEntry(chain(linear, norm(1), nn.LeakyReLU), floats((6, 8))),
}
