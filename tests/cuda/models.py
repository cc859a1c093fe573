"""Small models, each with one thing that touches devices: states, constants, integers, packed sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.helpers.training import ConvNet, SequenceNet

Batch = tuple[Tensor, ...]


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module], **options: Any) -> None:
        super().__init__()
        self.layer = kind(6, 8, **options)
        self.fc = nn.Linear(16 if options.get("bidirectional") else 8, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc(self.layer(x)[0])
        return result


class Packed(Recurrent):
    def __init__(self) -> None:
        super().__init__(nn.LSTM)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
        packed, _ = self.layer(pack_padded_sequence(x, lengths, enforce_sorted=False))
        result: Tensor = self.fc(pad_packed_sequence(packed)[0])
        return result


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions, self.fc = nn.Embedding(50, 16), nn.Embedding(40, 16), nn.Linear(16, 4)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        result: Tensor = self.fc(self.words(ids) + self.positions(places))
        return result


class Constants(nn.Module):
    """Makes tensors beside its input, and one state by a loop over time written in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.fc = nn.LSTMCell(6, 8), nn.Linear(8, 4)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(x.shape[1], 8, device=x.device), x.new_zeros(x.shape[1], 8)
        for step in range(x.shape[0]):
            state = self.cell(x[step], state)
        mask = torch.tril(torch.ones(8, 8, device=x.device))
        result: Tensor = self.fc(F.relu(state[0] @ mask) * self.scale)
        return result


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True)
        self.fc = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.triu(torch.full((x.shape[1], x.shape[1]), -torch.inf, device=x.device), 1)
        result: Tensor = self.fc(self.layer(x, src_mask=mask))
        return result


def floats(*shape: int) -> Callable[[torch.Generator], Batch]:
    return lambda generator: (torch.randn(*shape, generator=generator),)


def padded(generator: torch.Generator) -> Batch:
    return torch.randn(7, 4, 6, generator=generator), torch.tensor([7, 3, 5, 2])


#: Name -> the model, and what draws a batch on the CPU.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], Batch]]] = {
    "convolutions": (ConvNet, floats(8, 3, 10, 10)),
    "conv and LSTM": (SequenceNet, floats(8, 4, 7)),
    "LSTM, 2 layers, bidirectional": (
        lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True),
        floats(7, 4, 6),
    ),
    "GRU": (lambda: Recurrent(nn.GRU), floats(7, 4, 6)),
    "packed LSTM": (Packed, padded),
    "embeddings": (Words, lambda generator: (torch.randint(50, (4, 9), generator=generator),)),
    "loop and constants": (Constants, floats(7, 4, 6)),
    "transformer layer": (Encoder, floats(4, 9, 16)),
}


def model_and_batches(name: str, count: int = 4) -> tuple[nn.Module, list[Batch]]:
    """Return the model and its batches on the CPU, the same in each call."""
    torch.manual_seed(0)
    make, draw = MODELS[name]
    generator = torch.Generator().manual_seed(1)
    return make().eval(), [draw(generator) for _ in range(count)]
