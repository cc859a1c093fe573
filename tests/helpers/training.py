"""Models for quantization-aware training, shared by several tests."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import (
    get_default_qat_qconfig_mapping,
)

import torchq_compat as tc
from tests.helpers.once import made_once
from tests.helpers.oracle import MAP_LSTM


class ConvNet(nn.Module):
    """conv-bn-relu, conv-bn, residual add, linear; eps differs from the default."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8, eps=1e-2)
        self.conv = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.stem(x)))
        x = F.relu(self.bn2(self.conv(x)) + x)
        result: Tensor = self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return result


class SequenceNet(nn.Module):
    """conv-bn front end, LSTM, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 8, 3, padding=1)
        self.bn = nn.BatchNorm1d(8)
        self.lstm = nn.LSTM(8, 12, 2, dropout=0.1)
        self.fc = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn(self.conv(x))).permute(2, 0, 1)
        result: Tensor = self.fc(self.lstm(y)[0][-1])
        return result


SHAPES: dict[type[nn.Module], tuple[int, ...]] = {ConvNet: (8, 3, 10, 10), SequenceNet: (8, 4, 7)}


@made_once
def _prepared(make: type[nn.Module], backend: str, seed: int, device: str) -> nn.Module:
    torch.manual_seed(seed)
    model = make().to(device).train()
    example = (torch.randn(SHAPES[make], device=device),)
    return tc.prepare_qat_fx(model, get_default_qat_qconfig_mapping(backend), example, MAP_LSTM)


def prepare(make: type[nn.Module], backend: str = "qnnpack", seed: int = 0, device: str = "cpu") -> nn.Module:
    return _prepared(make, backend, seed, device)
