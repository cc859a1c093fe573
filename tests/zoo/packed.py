"""Recurrent models that pack their sequences: small, after their public definitions.

Results are those that a script measures: the logits, if the model ends in a log-softmax.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

__all__ = ["PACKED_ZOO", "PackedEntry"]

WORDS = 60


class Sentiment(nn.Module):
    """bentrevett/pytorch-sentiment-analysis, 2: packed text, two bidirectional LSTM layers, last states."""

    def __init__(self, width: int = 24, hidden: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width, padding_idx=1)
        self.rnn = nn.LSTM(width, hidden, num_layers=2, bidirectional=True, dropout=0.5)
        self.fc = nn.Linear(hidden * 2, 1)
        self.dropout = nn.Dropout(0.5)

    def forward(self, text: Tensor, text_lengths: Tensor) -> Tensor:
        embedded = self.dropout(self.embedding(text))
        packed = pack_padded_sequence(embedded, text_lengths.to("cpu"), enforce_sorted=False)
        packed_output, (hidden, _cell) = self.rnn(packed)
        _output, _output_lengths = pad_packed_sequence(packed_output)
        hidden = self.dropout(torch.cat((hidden[-2, :, :], hidden[-1, :, :]), dim=1))
        result: Tensor = self.fc(hidden)
        return result


class BatchRNN(nn.Module):
    """deepspeech.pytorch's: batch norm over steps, a packed bidirectional LSTM, directions summed."""

    def __init__(self, size: int, hidden: int, batch_norm: bool) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(size) if batch_norm else None
        self.rnn = nn.LSTM(size, hidden, bidirectional=True, bias=True)

    def flatten_parameters(self) -> None:
        self.rnn.flatten_parameters()

    def forward(self, x: Tensor, output_lengths: Tensor) -> Tensor:
        if self.batch_norm is not None:
            t, n = x.size(0), x.size(1)
            x = self.batch_norm(x.reshape(t * n, -1)).view(t, n, -1)
        packed = pack_padded_sequence(x, output_lengths)
        packed, _ = self.rnn(packed)
        x, _ = pad_packed_sequence(packed)
        return x.view(x.size(0), x.size(1), 2, -1).sum(2).view(x.size(0), x.size(1), -1)


class DeepSpeech2(nn.Module):
    """SeanNaren/deepspeech.pytorch: a strided convolution, batch-normed packed BiLSTMs, a head."""

    def __init__(self, features: int = 8, hidden: int = 24, classes: int = 15) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 4, 3, (2, 1), 1), nn.BatchNorm2d(4), nn.Hardtanh(0, 20))
        self.rnns = nn.ModuleList([BatchRNN(4 * features, hidden, False), BatchRNN(hidden, hidden, True)])
        self.fc = nn.Sequential(nn.BatchNorm1d(hidden), nn.Linear(hidden, classes, bias=False))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = self.conv(x.transpose(1, 2).unsqueeze(1))
        x = x.view(x.size(0), x.size(1) * x.size(2), x.size(3)).transpose(1, 2).transpose(0, 1).contiguous()
        for rnn in self.rnns:
            x = rnn(x, lengths)
        t, n = x.size(0), x.size(1)
        return self.fc(x.view(t * n, -1)).view(t, n, -1).transpose(0, 1)


class TacotronEncoder(nn.Module):
    """NVIDIA/tacotron2: convolutions over text, a packed bidirectional LSTM; lengths go through NumPy."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.convolutions = nn.ModuleList(
            nn.Sequential(nn.Conv1d(width, width, 5, padding=2), nn.BatchNorm1d(width)) for _ in range(2)
        )
        self.lstm = nn.LSTM(width, width // 2, 1, batch_first=True, bidirectional=True)

    def forward(self, text: Tensor, input_lengths: Tensor) -> Tensor:
        x = self.embedding(text).transpose(1, 2)
        for conv in self.convolutions:
            x = torch.dropout(torch.relu(conv(x)), 0.5, self.training)
        x = x.transpose(1, 2)
        input_lengths = input_lengths.cpu().numpy()
        x = pack_padded_sequence(x, input_lengths, batch_first=True)
        self.lstm.flatten_parameters()
        outputs, _ = self.lstm(x)
        outputs, _ = pad_packed_sequence(outputs, batch_first=True)
        return outputs


class SortingTagger(nn.Module):
    """A BiLSTM tagger as written before ``enforce_sorted``: it sorts by length itself, and back."""

    def __init__(self, width: int = 24, hidden: int = 16, tags: int = 7) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.lstm = nn.LSTM(width, hidden, bidirectional=True, batch_first=True)
        self.hidden2tag = nn.Linear(2 * hidden, tags)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        sorted_lengths, order = lengths.sort(descending=True)
        _, restore = order.sort()
        packed = pack_padded_sequence(self.embedding(words)[order], sorted_lengths.tolist(), batch_first=True)
        output, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=words.size(1))
        logits: Tensor = self.hidden2tag(output[restore])
        return logits


class AttentionClassifier(nn.Module):
    """A GRU text classifier with attention masked by lengths (hierarchical attention networks)."""

    def __init__(self, width: int = 24, hidden: int = 16, classes: int = 5) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.gru = nn.GRU(width, hidden, bidirectional=True, batch_first=True)
        self.attention = nn.Linear(2 * hidden, 2 * hidden)
        self.context = nn.Linear(2 * hidden, 1, bias=False)
        self.fc = nn.Linear(2 * hidden, classes)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embedding(words), lengths, batch_first=True, enforce_sorted=False)
        rows, _ = self.gru(packed)
        scores = self.context(torch.tanh(self.attention(rows.data)))
        output, found = pad_packed_sequence(rows, batch_first=True)
        weights, _ = pad_packed_sequence(rows._replace(data=scores), batch_first=True)
        mask = torch.arange(output.size(1))[None] >= found[:, None]
        weights = torch.softmax(weights.squeeze(-1).masked_fill(mask, float("-inf")), 1)
        result: Tensor = self.fc((weights.unsqueeze(-1) * output).sum(1))
        return result


@dataclass(frozen=True)
class PackedEntry:
    """A model and its inputs at ``batch`` and ``length``, together with falling lengths."""

    name: str
    source: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int, int], Tensor]
    recurrent: int

    def batch(self, batch: int, length: int) -> tuple[Any, ...]:
        lengths = torch.randint(1, length + 1, (batch,)).sort(descending=True).values
        lengths[0] = length
        return self.inputs(batch, length), lengths


def _words(batch: int, length: int) -> Tensor:
    return torch.randint(0, WORDS, (batch, length))


PACKED_ZOO = (
    PackedEntry(
        "sentiment", "bentrevett/pytorch-sentiment-analysis", Sentiment, lambda b, t: _words(t, b), 1
    ),
    PackedEntry(
        "deepspeech2", "SeanNaren/deepspeech.pytorch", DeepSpeech2, lambda b, t: torch.randn(b, t, 16), 2
    ),
    PackedEntry("tacotron2", "NVIDIA/tacotron2", TacotronEncoder, _words, 1),
    PackedEntry("sorting_tagger", "pytorch/tutorials", SortingTagger, _words, 1),
    PackedEntry("attention_classifier", "Yang et al. 2016", AttentionClassifier, _words, 1),
)
