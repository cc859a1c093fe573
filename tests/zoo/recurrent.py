"""Recurrent models as in their scripts: small, after their public definitions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.entry import Entry, Inputs, of_log_probabilities, of_probabilities, whole

__all__ = ["recurrent_models"]

WORDS = 60


class WordLanguageModel(nn.Module):
    """pytorch/examples word_language_model: embedding, two LSTM layers, decoder; the state is carried."""

    def __init__(self, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.encoder = nn.Embedding(WORDS, width)
        self.rnn = nn.LSTM(width, width, layers, dropout=0.2)
        self.decoder = nn.Linear(width, WORDS)

    def forward(self, words: Tensor, hidden: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        emb = self.drop(self.encoder(words))
        output, hidden = self.rnn(emb, hidden)
        decoded = self.decoder(self.drop(output))
        decoded = decoded.view(-1, WORDS)
        return F.log_softmax(decoded, dim=1), hidden


class AttentionDecoder(nn.Module):
    """pytorch/tutorials seq2seq: additive attention over the encoder's outputs, one GRU step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.query, self.key, self.value = (
            nn.Linear(width, width),
            nn.Linear(width, width),
            nn.Linear(width, 1),
        )
        self.gru = nn.GRU(2 * width, width, batch_first=True)
        self.out = nn.Linear(width, WORDS)

    def forward(self, word: Tensor, hidden: Tensor, encoded: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self.embedding(word)
        query = hidden.permute(1, 0, 2)
        scores = self.value(torch.tanh(self.query(query) + self.key(encoded)))
        weights = F.softmax(scores.squeeze(2).unsqueeze(1), dim=-1)
        context = torch.bmm(weights, encoded)
        output, hidden = self.gru(torch.cat((embedded, context), dim=2), hidden)
        return self.out(output), hidden


class Seq2Seq(nn.Module):
    """The same tutorial's encoder and decoder, teacher forced over the target's four words."""

    def __init__(self, width: int = 24, target_length: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.encoder = nn.GRU(width, width, batch_first=True)
        self.decoder = AttentionDecoder(width)
        self.target_length = target_length

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        encoded, hidden = self.encoder(self.embedding(source))
        outputs = []
        for i in range(self.target_length):
            output, hidden = self.decoder(target[:, i].unsqueeze(1), hidden, encoded)
            outputs.append(output)
        return F.log_softmax(torch.cat(outputs, dim=1), dim=-1)


class BidirectionalLSTM(nn.Module):
    def __init__(self, n_in: int, n_hidden: int, n_out: int) -> None:
        super().__init__()
        self.rnn = nn.LSTM(n_in, n_hidden, bidirectional=True)
        self.embedding = nn.Linear(n_hidden * 2, n_out)

    def forward(self, input: Tensor) -> Tensor:
        recurrent, _ = self.rnn(input)
        T, b, h = recurrent.size()
        output = self.embedding(recurrent.view(T * b, h))
        return output.view(T, b, -1)


class CRNN(nn.Module):
    """meijieru/crnn.pytorch: convolutions down to height 1, two bidirectional LSTMs over the width."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.cnn = nn.Sequential(
            *(nn.Conv2d(1, width, 3, 1, 1), nn.ReLU(True), nn.MaxPool2d(2, 2)),
            *(nn.Conv2d(width, width, 3, 1, 1), nn.ReLU(True), nn.MaxPool2d(2, 2)),
            *(nn.Conv2d(width, 2 * width, 3, 1, 1), nn.BatchNorm2d(2 * width), nn.ReLU(True)),
            nn.MaxPool2d((2, 2), (2, 1), (0, 1)),
            *(nn.Conv2d(2 * width, 2 * width, 3, 1, 1), nn.BatchNorm2d(2 * width), nn.ReLU(True)),
            nn.MaxPool2d((2, 2), (2, 1), (0, 1)),
            *(nn.Conv2d(2 * width, 2 * width, 2, 1, 0), nn.BatchNorm2d(2 * width), nn.ReLU(True)),
        )
        self.rnn = nn.Sequential(
            BidirectionalLSTM(2 * width, width, width), BidirectionalLSTM(width, width, 12)
        )

    def forward(self, input: Tensor) -> Tensor:
        conv = self.cnn(input)
        _b, _c, h, _w = conv.size()
        assert h == 1, "the height of conv must be 1"
        conv = conv.squeeze(2)
        conv = conv.permute(2, 0, 1)
        return self.rnn(conv)


class BatchRNN(nn.Module):
    """deepspeech.pytorch's: batch norm over all steps, bidirectional GRU, directions summed."""

    def __init__(self, size: int, hidden: int, batch_norm: bool) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(size) if batch_norm else None
        self.rnn = nn.LSTM(size, hidden, bidirectional=True, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        if self.batch_norm is not None:
            t, n = x.size(0), x.size(1)
            x = self.batch_norm(x.view(t * n, -1)).view(t, n, -1)
        x, _ = self.rnn(x)
        return x.view(x.size(0), x.size(1), 2, -1).sum(2).view(x.size(0), x.size(1), -1)


class DeepSpeech2(nn.Module):
    """SeanNaren/deepspeech.pytorch without packing: two 2-d convolutions, batch-normed BiLSTMs, a head."""

    def __init__(self, hidden: int = 24, classes: int = 15) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            *(nn.Conv2d(1, 8, (11, 5), (2, 2), (5, 2)), nn.BatchNorm2d(8), nn.Hardtanh(0, 20, inplace=True)),
            *(nn.Conv2d(8, 8, (7, 5), (2, 1), (3, 2)), nn.BatchNorm2d(8), nn.Hardtanh(0, 20, inplace=True)),
        )
        self.rnns = nn.Sequential(BatchRNN(8 * 8, hidden, False), BatchRNN(hidden, hidden, True))
        self.norm, self.fc = nn.BatchNorm1d(hidden), nn.Linear(hidden, classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        sizes = x.size()
        x = x.view(sizes[0], sizes[1] * sizes[2], sizes[3])
        x = x.transpose(1, 2).transpose(0, 1).contiguous()
        x = self.rnns(x)
        t, n = x.size(0), x.size(1)
        x = self.fc(self.norm(x.view(t * n, -1))).view(t, n, -1)
        return F.softmax(x.transpose(0, 1), dim=-1)


class SentimentClassifier(nn.Module):
    """bentrevett/pytorch-sentiment-analysis without packing: the last hidden states of both directions."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width, padding_idx=1)
        self.lstm = nn.LSTM(width, width, 2, bidirectional=True, dropout=0.5, batch_first=True)
        self.fc, self.dropout = nn.Linear(width * 2, 2), nn.Dropout(0.5)

    def forward(self, ids: Tensor) -> Tensor:
        embedded = self.dropout(self.embedding(ids))
        _, (hidden, _) = self.lstm(embedded)
        hidden = self.dropout(torch.cat([hidden[-1], hidden[-2]], dim=-1))
        return self.fc(hidden)


class KeywordGRU(nn.Module):
    """A keyword spotter after Arik et al. 2017: convolution over the spectrum, GRUs, the last step."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, (5, 5), (2, 2))
        self.gru = nn.GRU(8 * 6, width, 2, batch_first=True, bidirectional=True)
        self.fc1, self.fc2 = nn.Linear(2 * width, 16), nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x.unsqueeze(1)))
        n, c, f, t = x.shape
        x = x.permute(0, 3, 1, 2).reshape(n, t, c * f)
        x, _ = self.gru(x)
        return self.fc2(F.relu(self.fc1(x[:, -1])))


class Tagger(nn.Module):
    """A BiLSTM tagger (pytorch/tutorials, sequence models): a class for every word."""

    def __init__(self, width: int = 24, tags: int = 9) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(WORDS, width)
        self.lstm = nn.LSTM(width, width, bidirectional=True)
        self.hidden2tag = nn.Linear(2 * width, tags)

    def forward(self, sentence: Tensor) -> Tensor:
        embeds = self.word_embeddings(sentence)
        lstm_out, _ = self.lstm(embeds.view(len(sentence), 1, -1))
        tag_space = self.hidden2tag(lstm_out.view(len(sentence), -1))
        return F.log_softmax(tag_space, dim=1)


class TimeSequence(nn.Module):
    """pytorch/examples time_sequence_prediction: two LSTMCells in a loop over the columns, in float64."""

    def __init__(self, width: int = 21) -> None:
        super().__init__()
        self.width = width
        self.lstm1, self.lstm2 = nn.LSTMCell(1, width), nn.LSTMCell(width, width)
        self.linear = nn.Linear(width, 1)
        self.double()

    def forward(self, input: Tensor) -> Tensor:
        outputs = []
        h_t = torch.zeros(input.size(0), self.width, dtype=torch.double)
        c_t = torch.zeros(input.size(0), self.width, dtype=torch.double)
        h_t2 = torch.zeros(input.size(0), self.width, dtype=torch.double)
        c_t2 = torch.zeros(input.size(0), self.width, dtype=torch.double)
        for input_t in input.split(1, dim=1):
            h_t, c_t = self.lstm1(input_t, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            outputs += [self.linear(h_t2)]
        return torch.cat(outputs, dim=1)


class LockedDropout(nn.Module):
    def forward(self, x: Tensor, dropout: float = 0.5) -> Tensor:
        if not self.training or not dropout:
            return x
        mask = x.data.new(1, x.size(1), x.size(2)).bernoulli_(1 - dropout) / (1 - dropout)
        return mask.expand_as(x) * x


class AWDLSTM(nn.Module):
    """salesforce/awd-lstm-lm: a list of LSTMs of different widths, locked dropout, raw outputs returned."""

    def __init__(self, width: int = 20, hidden: int = 28, layers: int = 3) -> None:
        super().__init__()
        self.lockdrop = LockedDropout()
        self.encoder = nn.Embedding(WORDS, width)
        sizes = [width, *[hidden] * (layers - 1), width]
        self.rnns = nn.ModuleList(nn.LSTM(a, b, 1) for a, b in itertools.pairwise(sizes))
        self.decoder = nn.Linear(width, WORDS)
        self.decoder.weight = self.encoder.weight

    def forward(
        self, input: Tensor, hidden: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        raw_output = self.lockdrop(self.encoder(input), 0.4)
        new_hidden = []
        for i, rnn in enumerate(self.rnns):
            raw_output, new_h = rnn(raw_output, hidden[i])
            new_hidden.append(new_h)
            if i != len(self.rnns) - 1:
                raw_output = self.lockdrop(raw_output, 0.3)
        output = self.lockdrop(raw_output, 0.4)
        result = self.decoder(output.view(output.size(0) * output.size(1), output.size(2)))
        return result.view(output.size(0), output.size(1), result.size(1)), new_hidden


class MelResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv1d(width, width, 1, bias=False) for _ in range(2))
        self.batch_norm1, self.batch_norm2 = nn.BatchNorm1d(width), nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        x = F.relu(self.batch_norm1(self.conv1(x)))
        x = self.batch_norm2(self.conv2(x))
        return x + residual


class WaveRNN(nn.Module):
    """fatchord/WaveRNN: a residual network over the spectrum, upsampled; two GRUs that read its output."""

    def __init__(self, mels: int = 10, width: int = 16, hidden: int = 32, scale: int = 4) -> None:
        super().__init__()
        self.aux_dims, self.scale = width // 4, scale
        self.conv_in, self.batch_norm = (
            nn.Conv1d(mels, width, 3, padding=1, bias=False),
            nn.BatchNorm1d(width),
        )
        self.layers = nn.ModuleList(MelResidualBlock(width) for _ in range(2))
        self.conv_out = nn.Conv1d(width, width, 1)
        self.up = nn.Conv2d(1, 1, (1, 2 * scale + 1), padding=(0, scale), bias=False)
        self.I = nn.Linear(mels + self.aux_dims + 1, hidden)
        self.rnn1 = nn.GRU(hidden, hidden, batch_first=True)
        self.rnn2 = nn.GRU(hidden + self.aux_dims, hidden, batch_first=True)
        self.fc1, self.fc2 = (nn.Linear(hidden + self.aux_dims, hidden) for _ in range(2))
        self.fc3 = nn.Linear(hidden, 30)

    def forward(self, x: Tensor, mels: Tensor) -> Tensor:
        bsize = x.size(0)
        h1 = torch.zeros(1, bsize, self.rnn1.hidden_size, device=x.device)
        h2 = torch.zeros(1, bsize, self.rnn2.hidden_size, device=x.device)
        aux = F.relu(self.batch_norm(self.conv_in(mels)))
        for layer in self.layers:
            aux = layer(aux)
        aux = self._stretch(self.conv_out(aux)).transpose(1, 2)
        mels = self.up(self._stretch(mels).unsqueeze(1)).squeeze(1).transpose(1, 2)
        aux_idx = [self.aux_dims * i for i in range(5)]
        a1, a2, a3, a4 = (aux[:, :, aux_idx[i] : aux_idx[i + 1]] for i in range(4))
        x = self.I(torch.cat([x.unsqueeze(-1), mels, a1], dim=2))
        res = x
        x, _ = self.rnn1(x, h1)
        x = x + res
        res = x
        x, _ = self.rnn2(torch.cat([x, a2], dim=2), h2)
        x = torch.cat([x + res, a3], dim=2)
        x = torch.cat([F.relu(self.fc1(x)), a4], dim=2)
        return self.fc3(F.relu(self.fc2(x)))

    def _stretch(self, x: Tensor) -> Tensor:
        b, c, t = x.size()
        x = x.unsqueeze(-1).repeat(1, 1, 1, self.scale)
        return x.view(b, c, t * self.scale)


class TacotronEncoder(nn.Module):
    """NVIDIA/tacotron2's encoder without packing: three batch-normed convolutions and a BiLSTM."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.convolutions = nn.ModuleList(
            nn.Sequential(nn.Conv1d(width, width, 5, padding=2), nn.BatchNorm1d(width)) for _ in range(3)
        )
        self.lstm = nn.LSTM(width, width // 2, 1, batch_first=True, bidirectional=True)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text).transpose(1, 2)
        for conv in self.convolutions:
            x = F.dropout(F.relu(conv(x)), 0.5, self.training)
        x = x.transpose(1, 2)
        self.lstm.flatten_parameters()
        outputs, _ = self.lstm(x)
        return outputs


class Transducer(nn.Module):
    """An RNN-T: LSTM predictor with a start symbol in front, joined with the encoder over (T, U)."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.predictor = nn.LSTM(width, width, 2, batch_first=True)
        self.encoder = nn.LSTM(12, width, 1, batch_first=True)
        self.joint, self.out = nn.Linear(2 * width, width), nn.Linear(width, WORDS)

    def forward(self, audio: Tensor, labels: Tensor) -> Tensor:
        start = torch.zeros(labels.size(0), 1, self.embed.embedding_dim)
        predicted, _ = self.predictor(torch.cat([start, self.embed(labels)], dim=1))
        encoded, _ = self.encoder(audio)
        t, u = encoded.size(1), predicted.size(1)
        encoded = encoded.unsqueeze(2).expand(-1, -1, u, -1)
        predicted = predicted.unsqueeze(1).expand(-1, t, -1, -1)
        joined = torch.cat([encoded, predicted], dim=-1)
        return F.log_softmax(self.out(torch.tanh(self.joint(joined))), dim=-1)


class RNNoise(nn.Module):
    """xiph/rnnoise: three GRUs that read each other and the input, 22 band gains and a voice activity."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(42, width, 3), nn.Conv1d(width, width, 3)
        self.gru1, self.gru2, self.gru3 = (nn.GRU(width, width, batch_first=True) for _ in range(3))
        self.dense_out, self.vad_dense = nn.Linear(4 * width, 22), nn.Linear(4 * width, 1)

    def forward(
        self, features: Tensor, states: list[Tensor | None] | None = None
    ) -> tuple[Tensor, Tensor, list[Tensor | None]]:
        if states is None:
            states = [torch.zeros(1, features.size(0), self.gru1.hidden_size) for _ in range(3)]
        x = torch.tanh(self.conv1(features.permute([0, 2, 1])))
        x = torch.tanh(self.conv2(x)).permute([0, 2, 1])
        out1, state1 = self.gru1(x, states[0])
        out2, state2 = self.gru2(out1, states[1])
        out3, state3 = self.gru3(out2, states[2])
        out = torch.cat([x, out1, out2, out3], dim=-1)
        return (
            torch.sigmoid(self.dense_out(out)),
            torch.sigmoid(self.vad_dense(out)),
            [state1, state2, state3],
        )


def words(batch: int, length: int) -> Inputs:
    return (torch.randint(0, WORDS, (batch, length)),)


def states(layers: int, batch: int, width: int) -> tuple[Tensor, Tensor]:
    return torch.randn(layers, batch, width) * 0.3, torch.randn(layers, batch, width) * 0.3


TEXT = {"batch": 3, "length": 9}
OTHER_TEXT = ({"batch": 1}, {"length": 5}, {"batch": 5, "length": 14})


def recurrent_models() -> Iterator[Entry]:
    yield _entry(
        "word_language_model",
        "pytorch/examples",
        WordLanguageModel,
        lambda batch, length: (torch.randint(0, WORDS, (length, batch)), states(2, batch, 32)),
        of_log_probabilities,
    )
    yield _entry(
        "seq2seq_attention",
        "pytorch/tutorials",
        Seq2Seq,
        lambda batch, length: (*words(batch, length), torch.randint(0, WORDS, (batch, 4))),
        of_log_probabilities,
    )
    yield Entry(
        "crnn",
        "meijieru/crnn.pytorch",
        CRNN,
        lambda batch, width: (torch.randn(batch, 1, 32, width),),
        {"batch": 2, "width": 48},
        ({"batch": 1}, {"width": 64}, {"batch": 5}),
        is_recurrent=True,
    )
    yield _entry(
        "deepspeech2",
        "SeanNaren/deepspeech.pytorch",
        DeepSpeech2,
        lambda batch, length: (torch.randn(batch, 1, 32, 2 * length + 8),),
        of_probabilities,
    )
    yield _entry("sentiment_classifier", "bentrevett/pytorch-sentiment-analysis", SentimentClassifier, words)
    yield _entry(
        "kws_gru",
        "Arik et al. 2017",
        KeywordGRU,
        lambda batch, length: (torch.randn(batch, 16, 2 * length + 4),),
    )
    yield Entry(
        "bilstm_tagger",
        "pytorch/tutorials",
        Tagger,
        lambda length: (torch.randint(0, WORDS, (length,)),),
        {"length": 9},
        ({"length": 5}, {"length": 1}, {"length": 14}),
        is_recurrent=True,
        measured=of_log_probabilities,
    )
    yield _entry(
        "time_sequence",
        "pytorch/examples",
        TimeSequence,
        lambda batch, length: (torch.sin(torch.rand(batch, length, dtype=torch.double) * 6),),
    )
    yield _entry("awd_lstm", "salesforce/awd-lstm-lm", AWDLSTM, _awd_inputs)
    yield _entry(
        "wavernn",
        "fatchord/WaveRNN",
        WaveRNN,
        lambda batch, length: (torch.rand(batch, 4 * length) * 2 - 1, torch.randn(batch, 10, length)),
    )
    yield _entry("tacotron2_encoder", "NVIDIA/tacotron2", TacotronEncoder, words)
    yield _entry(
        "rnnt",
        "Graves 2012",
        Transducer,
        lambda batch, length: (torch.randn(batch, length + 3, 12), *words(batch, length)),
        of_log_probabilities,
    )
    yield _entry("rnnoise", "xiph/rnnoise", RNNoise, lambda batch, length: (torch.randn(batch, length, 42),))


def _awd_inputs(batch: int, length: int) -> Inputs:
    hidden = [states(1, batch, width) for width in (28, 28, 20)]
    return (torch.randint(0, WORDS, (length, batch)), hidden)


def _entry(
    name: str,
    source: str,
    make: Callable[[], nn.Module],
    inputs: Callable[..., Inputs],
    measured: Callable[[Any], Any] = whole,
) -> Entry:
    return Entry(name, source, make, inputs, TEXT, OTHER_TEXT, is_recurrent=True, measured=measured)
