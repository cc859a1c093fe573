"""Models that pack sequences inside of ``forward``, and sequences for them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from torchq_compat import get_default_prepare_custom_config
from torchq_compat.nn import quantizable

__all__ = ["PackedShape", "Packs", "map_all", "random_shapes"]

PADDING = -3.0


@dataclass(frozen=True)
class PackedShape:
    """How a model packs, and what is between packing and unpacking."""

    kind: str
    layers: int
    bidirectional: bool
    batch_first: bool
    enforce_sorted: bool
    proj_size: int = 0
    total_length: bool = False
    with_state: bool = False
    ops_on_rows: bool = False


def random_shapes(count: int, seed: int) -> list[PackedShape]:
    choice = random.Random(seed)
    flags = lambda: choice.random() < 0.5  # noqa: E731
    found = []
    for index in range(count):
        kind = ("LSTM", "GRU", "LSTM", "RNN")[index % 4]
        proj_size = 3 if kind == "LSTM" and flags() else 0
        found.append(
            PackedShape(
                kind, choice.randint(1, 2), flags(), flags(), flags(), proj_size, flags(), flags(), flags()
            )
        )
    return found


class Packs(nn.Module):
    """A recurrent module between packing and unpacking; returns result and states at sequence ends."""

    def __init__(self, shape: PackedShape, features: int = 6, hidden: int = 8) -> None:
        super().__init__()
        self.shape = shape
        more = {"proj_size": shape.proj_size} if shape.kind == "LSTM" else {}
        self.rnn = getattr(nn, shape.kind)(
            features,
            hidden,
            shape.layers,
            batch_first=shape.batch_first,
            bidirectional=shape.bidirectional,
            **more,
        )
        directions = 2 if shape.bidirectional else 1
        self.fc = nn.Linear((shape.proj_size or hidden) * directions, 4)
        self.widths = (shape.proj_size or hidden, hidden)[: 2 if shape.kind == "LSTM" else 1]
        self.rows = directions * shape.layers

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        shape = self.shape
        time, batch = (1, 0) if shape.batch_first else (0, 1)
        packed = pack_padded_sequence(
            x, lengths, batch_first=shape.batch_first, enforce_sorted=shape.enforce_sorted
        )
        if shape.ops_on_rows:
            packed = packed._replace(data=torch.tanh(packed.data) * 0.9)
        state: Any = None
        if shape.with_state:
            states = tuple(x.new_full((self.rows, x.size(batch), width), 0.3) for width in self.widths)
            state = states if len(states) > 1 else states[0]
        output, last = self.rnn(packed, state)
        padded, found = pad_packed_sequence(
            output,
            batch_first=shape.batch_first,
            padding_value=PADDING,
            total_length=x.size(time) if shape.total_length else None,
        )
        return padded, self.fc(padded), last, found

    def sequences(self, batch: int, steps: int, lengths: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """Return padded sequences of random lengths: one of a single step and two equal ones if ``batch``
        allows; the padding holds numbers that no range may include."""
        given = torch.randint(1, steps + 1, (batch,)) if lengths is None else torch.tensor(lengths)
        if lengths is None and batch > 3:
            given[1], given[2] = 1, given[3]
        if self.shape.enforce_sorted:
            given = given.sort(descending=True).values
        x = torch.randn(batch, steps, 6)
        x[torch.arange(steps) >= given[:, None]] = 1e4
        return (x if self.shape.batch_first else x.transpose(0, 1).contiguous()), given


def map_all() -> Any:
    config = get_default_prepare_custom_config()
    for name in ("GRU", "RNN"):
        config.set_float_to_observed_mapping(getattr(nn, name), getattr(quantizable, name))
    return config
