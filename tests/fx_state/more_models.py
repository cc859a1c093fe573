"""Models of common kinds, each with something that makes the names of FX's scales hard to assign."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Functional", "Hidden", "Patches", "Repeated", "Shared", "Tied", "TokensAndMask"]


class Patches(nn.Module):
    """Attention over patches: parameters beside ops, read before modules run; chunks; dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, 4)
        self.first, self.position = nn.Parameter(torch.randn(1, 1, 16)), nn.Parameter(torch.randn(1, 17, 16))
        self.norm, self.qkv, self.projection = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16))
        self.gamma, self.scale = nn.Parameter(0.5 * torch.ones(16)), nn.Parameter(0.1 * torch.randn(16))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1) + self.position
        q, k, v = self.qkv(self.norm(x)).reshape(x.shape[0], -1, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        weights = (torch.matmul(q, k.transpose(-2, -1)) * 8**-0.5).softmax(-1)
        x = x + self.gamma * self.projection(
            torch.matmul(weights, v).transpose(1, 2).reshape(x.shape[0], -1, 16)
        )
        x = x + self.mlp(x) * self.scale
        return self.head(x[:, 0])


class TokensAndMask(nn.Module):
    """Embeddings that are added, a mask, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.norm = nn.Embedding(30, 16), nn.Embedding(20, 16), nn.LayerNorm(16)
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.wide, self.narrow, self.pool = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 2)

    def forward(self, words: Tensor, places: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(self.words(words) + self.places(places))
        scores = torch.matmul(self.q(x), self.k(x).transpose(-1, -2)) / 4.0 + (1 - mask)[:, None, :] * -10.0
        x = x + torch.matmul(F.softmax(scores, dim=-1), self.v(x))
        x = x + self.narrow(F.gelu(self.wide(x)))
        return x, self.pool(x[:, 0])


class Functional(nn.Module):
    """Functionals with parameters of the model, one called as FX calls a quantized module's functional."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.bias = nn.Parameter(0.3 * torch.randn(6, 3, 3, 3)), nn.Parameter(torch.randn(6))
        self.wide, self.narrow = nn.Parameter(torch.randn(8, 6)), nn.Parameter(torch.randn(4, 8))
        self.scale = nn.Parameter(torch.randn(8))
        self.register_buffer("shift", 2 * torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        # FX does not lower functional convolutions with default arguments.
        x = F.relu(F.conv2d(x, self.kernel, self.bias, (1, 1), (1, 1), (1, 1), 1)).mean((2, 3))
        x = self.scale * torch.tanh(F.linear(x, self.wide)) + self.shift
        return F.linear(x, self.narrow)


class Shared(nn.Module):
    """One module under two names, called in a loop; a dict of results."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.again, self.norm, self.last = self.first, nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.first(x)
        for block in self.blocks:
            x = x + self.again(F.hardswish(block(self.norm(x))))
        return {"x": x, "y": self.last(x)}


class Tied(nn.Module):
    """An embedding whose weight is also the weight of a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.wide, self.out = nn.Embedding(10, 4), nn.Linear(4, 4), nn.Linear(4, 10, bias=False)
        self.out.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.out(F.relu(self.wide(self.words(words))))


class Repeated(nn.Module):
    """A model with ``contiguous()``, which torch.export drops, in front of other ops of the same code."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.act = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, padding=1), nn.Hardswish()

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.a(x), self.act(self.b(x))], 1).contiguous()

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.x, self.y = nn.Conv2d(3, 4, 3), Repeated.Branches(), Repeated.Branches()
        self.z, self.fc = nn.Conv2d(8, 4, 1), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.elu(self.stem(x))
        x = F.relu(self.z(self.x(x).contiguous()) + x)
        a, b = self.y(x).chunk(2, 1)
        x = torch.stack([a, b], 0).sum(0) * 2 + 1
        x = F.adaptive_avg_pool2d(torch.sigmoid(x) * F.hardtanh(a), 1).flatten(1)
        return self.fc(F.dropout(x, training=False)).clamp(-1, 1)


class Hidden(nn.Module):
    """Float recurrent modules inside modules that return all results, and inside modules that return one."""

    class All(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(8, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.rnn(x)

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.norm = nn.LSTM(8, 8), nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.rnn(x)[0])

    def __init__(self) -> None:
        super().__init__()
        self.first, self.bn = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.all, self.one, self.last, self.state = (
            Hidden.All(),
            Hidden.One(),
            nn.Linear(8, 3),
            nn.Linear(8, 2),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, h = self.all(self.bn(self.first(x).transpose(1, 2)).transpose(1, 2))
        return self.last(self.one(y + 1.5)), self.state(h)
