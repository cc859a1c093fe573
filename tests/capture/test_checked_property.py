"""A property: small models of troublesome pieces are prepared correctly for every size, or refused."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.fx import GraphModule

import torchq_compat as tc
from tests.helpers.oracle import quantize_nodes, sqnr
from torchq_compat.capture.trial_runs import difference, run_prepared
from torchq_compat.errors import InputError

WIDTH = 8


class Piece(nn.Module):
    """A module that maps (batch, time, WIDTH) to (batch, time, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.conv = nn.Linear(WIDTH, WIDTH), nn.Conv1d(WIDTH, WIDTH, 3, padding=1)


class SqueezePiece(Piece):
    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x.unsqueeze(1).squeeze(1))
        return y * 2 if y.dim() == 3 else y * 9


class SqueezeAllPiece(Piece):
    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x).mean(1, keepdim=True).squeeze(1)
        return x + y.view(x.size(0), 1, WIDTH)


class BroadcastPiece(Piece):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * torch.sigmoid(x.mean(2, keepdim=True)) + x[:, :1]


class RangePiece(Piece):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.fc(x[:, i]) for i in range(x.size(1))], 1)


class IterPiece(Piece):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([row * 0.5 + 1 for row in self.fc(x)])


class BranchPiece(Piece):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * 2 if x.size(1) > 5 else self.fc(x)


class FloatPiece(Piece):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) / float(x.size(1)) ** 0.5


class HalfPiece(Piece):
    def forward(self, x: Tensor) -> Tensor:
        half = int(x.size(1) * 0.5)
        return torch.cat([self.fc(x[:, :half]), x[:, half:]], 1)


class ResidualNormPiece(Piece):
    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x.transpose(1, 2)))).transpose(1, 2) + x


class DropoutPiece(Piece):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(F.relu(self.fc(x)))


class NoGradPiece(Piece):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.fc(x)
        return y + x


class IdentityPiece(Piece):
    def __init__(self) -> None:
        super().__init__()
        self.identity = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.identity(self.fc(x)))


class TuplePiece(Piece):
    def pair(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self.fc(x), {"skip": x}

    def forward(self, x: Tensor) -> Tensor:
        y, kept = self.pair(x)
        return y + kept["skip"]


class LSTMPiece(Piece):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.lstm(x)[0])


class ReshapePiece(Piece):
    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        return self.fc(x.reshape(b * t, c)).view(b, t, -1)


PIECES: list[Callable[[], Piece]] = [
    SqueezePiece, SqueezeAllPiece, BroadcastPiece, RangePiece, IterPiece, BranchPiece, FloatPiece, HalfPiece,
    ResidualNormPiece, DropoutPiece, NoGradPiece, IdentityPiece, TuplePiece, LSTMPiece, ReshapePiece,
]  # fmt: skip


def check(seed: int) -> None:
    """Draw a model and an example from ``seed``; compare every model made from them with the float model."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(*[draw.choice(PIECES)() for _ in range(draw.randint(1, 3))]).eval()
    batch, time = draw.choice([1, 1, 2, 4]), draw.choice([1, 4, 6])
    x = torch.randn(batch, time, WIDTH)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        custom = tc.get_default_prepare_custom_config()
        prepared = tc.prepare_fx(model, get_default_qconfig_mapping(), (x,), custom)
        calls: list[Any] = [x, torch.randn(2 * batch, time, WIDTH), torch.randn(batch, time + 3, WIDTH)]
        calls += [torch.randn(3, time, WIDTH), torch.randn(1, max(1, time - 1), WIDTH)]
        taken = [x]
        for call in calls:
            try:
                prepared.record.signature.bind((call,), {})  # type: ignore[operator, union-attr]
            except InputError:
                assert call is not x
                continue
            floats = model(call)
            off = run_prepared(prepared, (call,))
            assert difference(floats, off, 60) is None, (seed, call.shape, difference(floats, off, 60))
            prepared(call)
            taken.append(call)
        reference = tc.convert_to_reference_fx(prepared, tc.get_default_convert_custom_config())
        graphs = [part for part in reference.modules() if isinstance(part, GraphModule)]  # of loops as well
        assert any(quantize_nodes(graph) for graph in graphs), seed
        for call in taken:
            floats, ours = model(call), reference(call)
            assert floats.shape == ours.shape
            assert 12 < sqnr(floats, ours) < 75, (seed, call.shape, sqnr(floats, ours))


#: Every piece that the first forty have at a batch, or a time, of one or of more.
SEEDS = (0, 1, 2, 5, 6, 7, 9, 10, 11, 12, 16, 17, 18, 19, 20, 22, 24, 25, 27, 31, 33, 34, 35, 36)


@pytest.mark.parametrize("seed", SEEDS)
def test_small_models(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 1000, 50))
def test_a_thousand_small_models(first: int) -> None:
    for seed in range(first, first + 50):
        check(seed)
