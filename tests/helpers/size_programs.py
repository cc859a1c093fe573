"""Random programs whose Python reads sizes in every way that models do."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["OTHER_SIZES", "STEPS", "SizeProgram", "each_step_twice", "example"]

#: The sizes of the example, and of calls that are held to the float model.
EXAMPLE = (3, 6, 8)
OTHER_SIZES = ((2, 6, 8), (3, 9, 8), (1, 4, 8), (5, 1, 8), (3, 12, 8), (7, 6, 8))
Step = Callable[[Tensor], Tensor]


def example(shape: tuple[int, ...] = EXAMPLE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _branch(limit: int, dim: int) -> Step:
    return lambda x: x * 2 if x.size(dim) > limit else x - 1


def _even(x: Tensor) -> Tensor:
    return x + 1 if x.shape[1] % 2 == 0 else x


def _padded_to(multiple: int) -> Step:
    def padded(x: Tensor) -> Tensor:
        length = x.shape[1]
        y = F.pad(x, (0, 0, 0, -length % multiple))
        y = y.view(x.shape[0], -1, multiple, x.shape[2]).softmax(2).flatten(1, 2)
        return y[:, :length]

    return padded


def _written(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, : x.size(1) // 2] = 0.5
    y[:, -1] = 2.0
    y[0, :4] = y[0, :4] * 2
    return y


def _loop(x: Tensor) -> Tensor:
    total = torch.zeros_like(x[0])
    for row in x:
        total = total + row
    return x + total


def _range(x: Tensor) -> Tensor:
    return torch.stack([x[:, i] * i for i in range(x.size(1))], 1)


def _positions(x: Tensor) -> Tensor:
    return x + torch.arange(x.size(1), device=x.device)[None, :, None] / x.size(1)


def _causal(x: Tensor) -> Tensor:
    n = x.size(1)
    mask = torch.ones(n, n, dtype=torch.bool).tril()
    scores = (x @ x.transpose(1, 2)) * x.size(-1) ** -0.5
    return scores.masked_fill(~mask, -1e4).softmax(-1) @ x


def _relative(x: Tensor) -> Tensor:
    n = x.shape[1]
    table = torch.arange(2 * n - 1, dtype=torch.float32)
    index = torch.arange(n)[:, None] - torch.arange(n)[None] + n - 1
    return x + table[index].mean(1)[None, :, None]


def _halves(x: Tensor) -> Tensor:
    a, b = x.chunk(2, 2)
    return torch.cat([b, a], 2)


def _split_time(x: Tensor) -> Tensor:
    first, last = x.split([x.size(1) // 2, x.size(1) - x.size(1) // 2], 1)
    return torch.cat([last, first], 1)


def _squeezed(x: Tensor) -> Tensor:
    y = x[:, :1].squeeze(1)
    return x + (y[:, None] if y.dim() == 2 else y)


def _interpolated(x: Tensor) -> Tensor:
    y = F.interpolate(x.transpose(1, 2), scale_factor=2.0).transpose(1, 2)
    return F.interpolate(y.transpose(1, 2), size=x.size(1)).transpose(1, 2)


def _rounded(x: Tensor) -> Tensor:
    return (
        x[:, : math.ceil(x.size(1) / 2)].mean(1, keepdim=True)
        + x[:, : int(x.size(1) * 0.5) + 1].amax(1)[:, None]
    )


def _counted(x: Tensor) -> Tensor:
    return x / x.numel() * len(x) + x.shape.numel()


def _unfolded(x: Tensor) -> Tensor:
    return x.reshape((*x.shape[:1], x.shape[1] * x.shape[2])).view(*x.size())


STEPS: dict[str, Step] = {
    "branch": _branch(4, 1),
    "branch on the batch": _branch(2, 0),
    "even": _even,
    "padded to 4": _padded_to(4),
    "padded to 5": _padded_to(5),
    "written": _written,
    "loop": _loop,
    "range": _range,
    "positions": _positions,
    "causal": _causal,
    "relative": _relative,
    "halves": _halves,
    "split": _split_time,
    "squeezed": _squeezed,
    "interpolated": _interpolated,
    "rounded": _rounded,
    "counted": _counted,
    "unfolded": _unfolded,
    "view": lambda x: x.view(x.size(0), -1, x.size(2)).contiguous(),
    "transposed": lambda x: (
        x.transpose(0, 1).contiguous().view(x.size(1), -1).view(x.size(1), x.size(0), -1).transpose(0, 1)
    ),
    "expanded": lambda x: x.mean(1, keepdim=True).expand(-1, x.size(1), -1) + x,
    "new": lambda x: torch.cat([x.new_zeros(x.size(0), 2, x.size(2)), x], 1)[:, 2:],
    "long cut": lambda x: x[:, :7] if x.size(1) <= 7 else x,
    "cut": lambda x: torch.cat([x[:, :5], x[:, 5:]], 1),
    "last": lambda x: x + x[:, -1:] + x[..., x.size(2) // 2 : x.size(2) // 2 + 1],
    "stride": lambda x: x.as_strided(x.size(), x.stride()) * x.stride(1),
    "min": lambda x: x * min(x.size(0), x.size(1)) + max(x.shape[1], 5),
    "mean by hand": lambda x: x.sum(1, keepdim=True) / x.size(1) + x,
    "full": lambda x: x + torch.full((x.size(1), 1), x.size(0) * 0.5),
    "roll": lambda x: x.roll(x.size(1) // 3, 1),
    "narrow": lambda x: x + x.narrow(1, x.size(1) - 1, 1),
    "norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "float": lambda x: x * float(x.size(1)) ** 0.5,
    "unbind": lambda x: torch.stack(x.unbind(2)[::-1], 2),
    "indexed": lambda x: x[:, torch.arange(x.size(1) - 1, -1, -1)],
    "list": lambda x: x.reshape(list(x.shape)),
    "pooled": lambda x: F.adaptive_avg_pool1d(x.transpose(1, 2), x.size(1)).transpose(1, 2),
    "repeat": lambda x: (
        x.repeat(1, 2, 1)[:, : x.size(1)] + x.repeat_interleave(x.size(1), 1)[:, :: x.size(1)]
    ),
    "one": lambda x: x + (x.size(0) == 1),
    "mask": lambda x: x.masked_fill(torch.arange(x.size(1))[None, :, None] >= x.size(1) - 1, 0.0),
}


class SizeProgram(nn.Module):
    """A few steps, random ones if none are given, and linear layers between them."""

    def __init__(self, seed: int, names: Sequence[str] = ()) -> None:
        super().__init__()
        pick = random.Random(seed)
        self.names = names or [pick.choice(list(STEPS)) for _ in range(pick.randint(1, 4))]
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in self.names)

    def forward(self, x: Tensor) -> Any:
        sizes = []
        for name, layer in zip(self.names, self.layers, strict=True):
            x = STEPS[name](layer(x))
            sizes.append(x.sum(-1))
        return x, sizes[0]


def each_step_twice() -> list[list[str]]:
    """Return the names of the steps of programs, of three or four, that have every step, beside others the
    second time."""
    rounds = [random.Random(seed).sample(list(STEPS), len(STEPS)) for seed in range(2)]
    return [names[first::13] for names in rounds for first in range(13)]
