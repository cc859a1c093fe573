"""Models with loops over time in the shapes that public code has: scans, decoders, cells of one's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

__all__ = ["PUBLIC_LOOPS", "PublicLoop"]


class SelectiveScan(nn.Module):
    """Mamba's scan, as in its short versions; it may stand in a function, as in those of transformers."""

    def __init__(self, scan: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.scan = scan
        self.in_proj, self.x_proj, self.dt_proj = nn.Linear(6, 16), nn.Linear(8, 9), nn.Linear(1, 8)
        self.a_log = nn.Parameter(torch.log(torch.arange(1.0, 5.0)).repeat(8, 1))
        self.d = nn.Parameter(torch.ones(8))
        self.out = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        b, length, _ = x.shape
        u, gate = self.in_proj(x).split([8, 8], dim=-1)
        u = F.silu(u)
        a = -torch.exp(self.a_log.float())
        delta, bb, cc = self.x_proj(u).split([1, 4, 4], dim=-1)
        delta = F.softplus(self.dt_proj(delta))
        delta_a = torch.exp(torch.einsum("bld,dn->bldn", delta, a))
        delta_bu = torch.einsum("bld,bln,bld->bldn", delta, bb, u)
        if self.scan is not None:
            return self.out((self.scan(delta_a, delta_bu, cc) + u * self.d) * F.silu(gate))
        state = torch.zeros((b, 8, 4), device=delta_a.device)
        ys = []
        for i in range(length):
            state = delta_a[:, i] * state + delta_bu[:, i]
            ys.append(torch.einsum("bdn,bn->bd", state, cc[:, i, :]))
        y = torch.stack(ys, dim=1) + u * self.d
        return self.out(y * F.silu(gate))


def _selective_scan(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    state = torch.zeros(a.shape[0], *a.shape[2:])
    ys = []
    for index in range(a.shape[1]):
        state = a[:, index] * state + b[:, index]
        ys.append(torch.matmul(state, c[:, index, :].unsqueeze(-1))[:, :, 0])
    return torch.stack(ys, dim=1)


class LinearRecurrence(nn.Module):
    """A gated linear recurrence over the first dimension, whose last state is returned too."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.output = nn.Linear(6, 16), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Any:
        a, b = self.gates(x.transpose(0, 1)).chunk(2, -1)
        a = torch.sigmoid(a)
        h = torch.zeros_like(a[0])
        out = torch.empty_like(a)
        for t in range(a.shape[0]):
            h = a[t] * h + (1 - a[t]) * b[t]
            out[t] = h
        return self.output(out).transpose(0, 1), h


class RawLSTM(nn.Module):
    """An LSTM written with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 32) * 0.3)
        self.u = nn.Parameter(torch.randn(8, 32) * 0.3)
        self.bias = nn.Parameter(torch.randn(32) * 0.1)

    def forward(self, x: Tensor, init_states: Any = None) -> Any:
        bs, seq_sz, _ = x.size()
        hidden_seq = []
        if init_states is None:
            h_t, c_t = torch.zeros(bs, 8).to(x.device), torch.zeros(bs, 8).to(x.device)
        else:
            h_t, c_t = init_states
        n = 8
        for t in range(seq_sz):
            x_t = x[:, t, :]
            gates = x_t @ self.w + h_t @ self.u + self.bias
            i_t, f_t, g_t, o_t = (
                torch.sigmoid(gates[:, :n]),
                torch.sigmoid(gates[:, n : n * 2]),
                torch.tanh(gates[:, n * 2 : n * 3]),
                torch.sigmoid(gates[:, n * 3 :]),
            )
            c_t = f_t * c_t + i_t * g_t
            h_t = o_t * torch.tanh(c_t)
            hidden_seq.append(h_t.unsqueeze(0))
        hidden = torch.cat(hidden_seq, dim=0)
        return hidden.transpose(0, 1).contiguous(), (h_t, c_t)


class PackedEncoder(nn.Module):
    """A decoder with attention behind a packed encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.GRU(6, 8, batch_first=True)
        self.embedding, self.query = nn.Embedding(12, 8), nn.Linear(8, 8)
        self.cell, self.output = nn.GRUCell(16, 8), nn.Linear(16, 12)

    def forward(self, x: Tensor, lengths: Tensor, words: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        packed_out, h = self.encoder(packed)
        memory, _ = pad_packed_sequence(packed_out, batch_first=True)
        mask = torch.arange(memory.size(1))[None, :] >= lengths[:, None]
        state, logits = h[-1], []
        for t in range(words.size(1)):
            scores = torch.bmm(memory, self.query(state).unsqueeze(2)).squeeze(2)
            weights = torch.softmax(scores.masked_fill(mask, float("-inf")), -1)
            context = torch.bmm(weights.unsqueeze(1), memory).squeeze(1)
            state = self.cell(torch.cat([self.embedding(words[:, t]), context], -1), state)
            logits.append(self.output(torch.cat([state, context], -1)))
        return torch.stack(logits, 1)


class LocationSensitive(nn.Module):
    """Tacotron 2's decoder: attention weights and their sum are states."""

    def __init__(self) -> None:
        super().__init__()
        self.prenet = nn.Linear(5, 6)
        self.attention_rnn, self.decoder_rnn = nn.LSTMCell(14, 8), nn.LSTMCell(16, 8)
        self.query, self.memory = nn.Linear(8, 7, bias=False), nn.Linear(8, 7, bias=False)
        self.location = nn.Conv1d(2, 3, 3, padding=1, bias=False)
        self.location_dense, self.v = nn.Linear(3, 7, bias=False), nn.Linear(7, 1, bias=False)
        self.project, self.gate = nn.Linear(16, 5), nn.Linear(16, 1)

    def forward(self, memory: Tensor, frames: Tensor) -> Any:
        b, t_in = memory.size(0), memory.size(1)
        zeros = [memory.new_zeros(b, 8) for _ in range(4)]
        attention_h, attention_c, decoder_h, decoder_c = zeros
        weights, cumulative = memory.new_zeros(b, t_in), memory.new_zeros(b, t_in)
        context, processed = memory.new_zeros(b, 8), self.memory(memory)
        go = frames.new_zeros(b, 1, 5)
        inputs = F.relu(self.prenet(torch.cat((go, frames), 1))).transpose(0, 1)
        mels, gates, alignments = [], [], []
        while len(mels) < inputs.size(0) - 1:
            frame = inputs[len(mels)]
            attention_h, attention_c = self.attention_rnn(
                torch.cat((frame, context), -1), (attention_h, attention_c)
            )
            both = torch.cat((weights.unsqueeze(1), cumulative.unsqueeze(1)), dim=1)
            located = self.location_dense(self.location(both).transpose(1, 2))
            energies = self.v(torch.tanh(self.query(attention_h.unsqueeze(1)) + located + processed))
            weights = F.softmax(energies.squeeze(-1), dim=1)
            cumulative = cumulative + weights
            context = torch.bmm(weights.unsqueeze(1), memory).squeeze(1)
            decoder_h, decoder_c = self.decoder_rnn(
                torch.cat((attention_h, context), -1), (decoder_h, decoder_c)
            )
            hidden = torch.cat((decoder_h, context), dim=1)
            mels += [self.project(hidden)]
            gates += [self.gate(hidden).squeeze(1)]
            alignments += [weights]
        return torch.stack(mels).transpose(0, 1), torch.stack(gates, 1), torch.stack(alignments, 1)


class WritesSteps(nn.Module):
    """A decoder that writes its outputs and attentions into tensors, and reads its last prediction."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(12, 8), nn.LSTM(16, 8)
        self.encoder, self.attn, self.out = nn.LSTM(6, 8), nn.Linear(16, 1), nn.Linear(8, 12)

    def forward(self, src: Tensor, trg: Tensor) -> Any:
        src, trg = src.transpose(0, 1), trg.t()
        memory, (hidden, cell) = self.encoder(src)
        trg_len, batch = trg.shape
        outputs = torch.zeros(trg_len, batch, 12).to(src.device)
        attentions = torch.zeros(trg_len, batch, src.shape[0])
        token = trg[0, :]
        for t in range(1, trg_len):
            repeated = hidden[-1].unsqueeze(0).repeat(memory.shape[0], 1, 1)
            a = torch.softmax(self.attn(torch.cat((repeated, memory), 2)).squeeze(2), 0).t()
            context = torch.bmm(a.unsqueeze(1), memory.transpose(0, 1)).transpose(0, 1)
            y, (hidden, cell) = self.rnn(
                torch.cat((self.embedding(token.unsqueeze(0)), context), 2), (hidden, cell)
            )
            prediction = self.out(y.squeeze(0))
            outputs[t] = prediction
            attentions[t] = a
            token = prediction.argmax(1)
        return outputs, attentions


class PointerNetwork(nn.Module):
    """Every step points at an input that no step before has pointed at."""

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.embed, self.encoder = nn.Linear(2, 8), nn.LSTM(8, 8, batch_first=True)
        self.cell, self.w1, self.w2 = nn.LSTMCell(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.v, self.start = nn.Linear(8, 1), nn.Parameter(torch.randn(8))
        self.in_place = in_place

    def forward(self, x: Tensor) -> Any:
        b, n, _ = x.shape
        embedded = self.embed(x)
        memory, (h, c) = self.encoder(embedded)
        h, c = h[-1], c[-1]
        keys, mask = self.w1(memory), torch.ones(b, n, dtype=torch.bool)
        token = self.start.expand(b, -1)
        log_probs, pointers = [], []
        for _ in range(n):
            h, c = self.cell(token, (h, c))
            scores = self.v(torch.tanh(keys + self.w2(h).unsqueeze(1))).squeeze(-1)
            log_prob = F.log_softmax(scores.masked_fill(~mask, float("-inf")), -1)
            index = log_prob.argmax(-1)
            if self.in_place:
                mask = mask.clone()
                mask[torch.arange(b), index] = False
            else:
                mask = mask.scatter(1, index.unsqueeze(1), False)
            token = embedded.gather(1, index.view(b, 1, 1).expand(-1, -1, 8)).squeeze(1)
            log_probs.append(torch.softmax(scores, -1))
            pointers.append(index)
        return torch.stack(log_probs, 1), torch.stack(pointers, 1)


class OneHot(nn.Module):
    """A character decoder that reads its last prediction one-hot."""

    def __init__(self) -> None:
        super().__init__()
        self.init, self.cell, self.output = nn.Linear(6, 8), nn.GRUCell(12, 8), nn.Linear(8, 12)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        h, token = torch.tanh(self.init(x.mean(1))), words[:, 0]
        outputs = []
        for _ in range(words.size(1)):
            h = self.cell(F.one_hot(token, num_classes=12).float(), h)
            logits = self.output(h)
            token = logits.max(1)[1]
            outputs.append(logits.unsqueeze(1))
        return torch.cat(outputs, 1)


class EverySecond(nn.Module):
    """A recurrent layer that reads every second frame with the one behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.output = nn.GRUCell(12, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        h, outputs = x.new_zeros(x.size(0), 8), []
        for t in range(0, x.size(1) - 1, 2):
            h = self.cell(torch.cat([x[:, t], x[:, t + 1]], -1), h)
            outputs.append(self.output(h))
        return torch.stack(outputs, dim=1)


class BreaksOff(nn.Module):
    """A loop to a bound that breaks where the input ends."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.output = nn.LSTMCell(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        state, outputs = None, []
        for t in range(200):
            if t >= x.size(1):
                break
            state = self.cell(x[:, t], state)
            outputs.append(self.output(state[0]))
        return torch.stack(outputs, dim=1)


class NormedLSTMCell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ih, self.hh = nn.Linear(6, 32, bias=False), nn.Linear(8, 32, bias=False)
        self.norm_ih, self.norm_hh, self.norm_c = nn.LayerNorm(32), nn.LayerNorm(32), nn.LayerNorm(8)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        h, c = state
        i, f, g, o = (self.norm_ih(self.ih(x)) + self.norm_hh(self.hh(h))).chunk(4, 1)
        c = self.norm_c(torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g))
        return torch.sigmoid(o) * torch.tanh(c), c


class CellOfOnesOwn(nn.Module):
    """A loop over a user's cell with children."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = NormedLSTMCell()

    def forward(self, x: Tensor) -> Any:
        inputs = x.unbind(1)
        state = (x.new_zeros(x.size(0), 8), x.new_zeros(x.size(0), 8))
        outputs = []
        for i in range(len(inputs)):
            state = self.cell(inputs[i], state)
            outputs += [state[0]]
        return torch.stack(outputs, 1), state


class TimeMixing(nn.Module):
    """RWKV's time mixing: the maximum so far is a state and starts at -1e38."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = nn.Linear(6, 8, bias=False), nn.Linear(6, 8, bias=False)
        self.receptance, self.output = nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)
        self.decay = nn.Parameter(torch.linspace(-2, 1, 8))
        self.first = nn.Parameter(torch.linspace(-1, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        b, length, _ = x.size()
        k, v, r = self.key(x), self.value(x), torch.sigmoid(self.receptance(x))
        w = -torch.exp(self.decay)
        aa, bb = torch.zeros(b, 8), torch.zeros(b, 8)
        pp, ys = torch.full((b, 8), -1e38), []
        for t in range(length):
            kk, vv = k[:, t], v[:, t]
            ww = self.first + kk
            p = torch.maximum(pp, ww)
            e1, e2 = torch.exp(pp - p), torch.exp(ww - p)
            ys.append((e1 * aa + e2 * vv) / (e1 * bb + e2))
            ww = pp + w
            p = torch.maximum(ww, kk)
            e1, e2 = torch.exp(ww - p), torch.exp(kk - p)
            aa, bb, pp = e1 * aa + e2 * vv, e1 * bb + e2, p
        return self.output(r * torch.stack(ys, dim=1))


class ConvLSTM(nn.Module):
    """Frames through a convolutional cell."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2 + 3, 12, 3, padding=1), nn.Conv2d(3, 1, 1)

    def forward(self, x: Tensor) -> Any:
        b, seq_len, _, h, w = x.size()
        hidden, cell = torch.zeros(b, 3, h, w), torch.zeros(b, 3, h, w)
        inner = []
        for t in range(seq_len):
            gates = self.conv(torch.cat([x[:, t, :, :, :], hidden], dim=1))
            i, f, o, g = torch.split(gates, 3, dim=1)
            cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
            hidden = torch.sigmoid(o) * torch.tanh(cell)
            inner.append(hidden)
        return torch.stack(inner, dim=1), self.head(hidden)


class DecayingGRU(nn.Module):
    """GRU-D: values, masks and times since the last value are read step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.decay_x, self.decay_h = nn.Linear(6, 6), nn.Linear(6, 8)
        self.z, self.r, self.h = nn.Linear(20, 8), nn.Linear(20, 8), nn.Linear(20, 8)
        self.register_buffer("mean", torch.zeros(6))
        self.output = nn.Linear(8, 3)

    def step(self, x: Tensor, last: Tensor, h: Tensor, mask: Tensor, delta: Tensor) -> Any:
        keep = torch.exp(-torch.relu(self.decay_x(delta)))
        x = mask * x + (1 - mask) * (keep * last + (1 - keep) * self.mean)
        h = torch.exp(-torch.relu(self.decay_h(delta))) * h
        combined = torch.cat((x, h, mask), 1)
        z, r = torch.sigmoid(self.z(combined)), torch.sigmoid(self.r(combined))
        candidate = torch.tanh(self.h(torch.cat((x, r * h, mask), 1)))
        return (1 - z) * h + z * candidate

    def forward(self, values: Tensor) -> Tensor:
        x, mask, delta = values.unbind(1)
        h = torch.zeros(x.size(0), 8)
        outputs, last = None, x[:, 0] * 0
        for i in range(x.size(1)):
            now, seen = torch.squeeze(x[:, i : i + 1, :], 1), torch.squeeze(mask[:, i : i + 1, :], 1)
            h = self.step(now, last, h, seen, torch.squeeze(delta[:, i : i + 1, :], 1))
            last = seen * now + (1 - seen) * last
            outputs = h.unsqueeze(1) if outputs is None else torch.cat((outputs, h.unsqueeze(1)), 1)
        return self.output(outputs)


class EulerSteps(nn.Module):
    """An ODE integrated over given times, whose differences are the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.read = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)), nn.Linear(8, 2)

    def forward(self, z: Tensor, times: Tensor) -> Tensor:
        path = [z]
        for i in range(len(times) - 1):
            z = z + (times[i + 1] - times[i]) * self.f(z)
            path.append(z)
        return self.read(torch.stack(path))


class FastWeights(nn.Module):
    """Linear attention as a recurrence over a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(6, 24), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = (e.view(b, n, 2, 4).transpose(1, 2) for e in self.qkv(x).chunk(3, -1))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        memory, z = x.new_zeros(b, 2, 4, 4), x.new_zeros(b, 2, 4)
        o = torch.zeros_like(v)
        for i in range(n):
            memory = memory + k[:, :, i].unsqueeze(-1) * v[:, :, i].unsqueeze(-2)
            z = z + k[:, :, i]
            o[:, :, i] = torch.einsum("bhk,bhkv->bhv", q[:, :, i], memory) / (
                (q[:, :, i] * z).sum(-1, keepdim=True) + 1e-6
            )
        return self.out(o.transpose(1, 2).reshape(b, n, 8))


class ForgetMult(nn.Module):
    """QRNN's pooling: the first step has no state before it."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.output = nn.Linear(6, 24), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        z, f, o = self.gates(x.transpose(0, 1)).chunk(3, dim=2)
        z, f = torch.tanh(z), torch.sigmoid(f)
        result, forgets, prev_h = [], f.split(1, dim=0), None
        for i, h in enumerate((f * z).split(1, dim=0)):
            if prev_h is not None:
                h = h + (1 - forgets[i]) * prev_h
            h = h.view(h.size()[1:])
            result.append(h)
            prev_h = h
        return self.output(torch.sigmoid(o) * torch.stack(result))


class BothDirections(nn.Module):
    """A bidirectional layer that fills a list from its end."""

    def __init__(self) -> None:
        super().__init__()
        self.forward_cell, self.backward_cell = nn.LSTMCell(6, 8), nn.LSTMCell(6, 8)
        self.output = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        seq_len, b = x.size(1), x.size(0)
        h, c, outputs = torch.zeros(b, 8), torch.zeros(b, 8), []
        for t in range(seq_len):
            h, c = self.forward_cell(x[:, t], (h, c))
            outputs.append(h)
        h, c = torch.zeros(b, 8), torch.zeros(b, 8)
        behind: list[Any] = [None] * seq_len
        for t in range(seq_len - 1, -1, -1):
            h, c = self.backward_cell(x[:, t], (h, c))
            behind[t] = h
        return self.output(torch.stack([torch.cat(pair, 1) for pair in zip(outputs, behind, strict=True)], 1))


class ForwardAlgorithm(nn.Module):
    """The partition function of a CRF, with a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.emit = nn.Linear(6, 5)
        self.transitions, self.start = nn.Parameter(torch.randn(5, 5)), nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        emissions, mask = self.emit(x).transpose(0, 1), mask.transpose(0, 1)
        score = self.start + emissions[0]
        for i in range(1, emissions.size(0)):
            broadcast = score.unsqueeze(2) + self.transitions + emissions[i].unsqueeze(1)
            score = torch.where(mask[i].unsqueeze(1), torch.logsumexp(broadcast, dim=1), score)
        return torch.logsumexp(score, dim=1)


class Positions(nn.Module):
    """A decoder that adds the embedding of the step's number."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.cell, self.output = nn.Embedding(64, 6), nn.GRUCell(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        h, outputs = x.new_zeros(x.size(0), 8), []
        for t in range(x.size(1)):
            position = torch.full((x.size(0),), t, dtype=torch.long)
            h = self.cell(x[:, t] + self.positions(position), h)
            outputs.append(self.output(h) / (t + 1))
        return torch.stack(outputs, 1)


class StackedSteps(nn.Module):
    """Layers of cells in a ModuleList, with states in lists, as in WaveRNN and Transformer-like decoders."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList([nn.GRUCell(6, 8), nn.GRUCell(8, 8)])
        self.fc, self.skip = nn.Linear(8, 5), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Any:
        states = [torch.zeros(x.size(0), 8) for _ in self.cells]
        outputs = []
        for step in x.permute(1, 0, 2):
            value = step
            for index, cell in enumerate(self.cells):
                states[index] = cell(value, states[index])
                value = states[index] + self.skip(step)
            outputs.append(self.fc(F.relu(value)))
        return torch.stack(outputs).permute(1, 0, 2), torch.stack(states)


class WritesParts(nn.Module):
    """SRU's plain form: a step of a direction is written; the state is a part of a tensor, as in EdgeML's."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.weight = nn.Linear(6, 24), nn.Parameter(torch.randn(8))
        self.output = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Any:
        length, batch = x.size(1), x.size(0)
        u, f, skip = self.inputs(x).transpose(0, 1).chunk(3, -1)
        scale = u.shape[-1] ** -0.5
        h = x.new_zeros(length, batch, 2, 8)
        state = torch.zeros([2, batch, 8]).to(x.device)
        for t, part in enumerate(u.chunk(length)):
            forget = torch.sigmoid(f[t] + state[0].clone() * self.weight)
            state[0] = forget * state[0].clone() + (1 - forget) * part.squeeze(0)
            state[1] = torch.tanh(state[0]) * scale
            assert not torch.isnan(state).any()
            h[t, :, 0, :] = state[0]
            h[t, :, 1, :] = (state[1] + skip[t]).unsqueeze(0)
        return self.output(h.view(length, batch, -1)), state


class WithVariable(nn.Module):
    """A cell behind a function, with states as before PyTorch 0.4; the module is not called ``self``."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.output = nn.GRUCell(6, 8), nn.Linear(8, 5)

    def forward(this, x: Tensor) -> Tensor:  # noqa: N805
        h = torch.autograd.Variable(torch.zeros(x.size(0), 8))
        return this.output(_scan(this.cell, x, h))


def _scan(cell: nn.Module, x: Tensor, h: Tensor) -> Tensor:
    outputs = []
    for t in range(x.size(1)):
        h = cell(x[:, t], h)
        outputs.append(h)
    return torch.stack(outputs, 1)


class PhasedLSTM(nn.Module):
    """A gate of time lets a part of each new state through; the last state is read beside all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(6, 8)
        self.period, self.phase = nn.Parameter(torch.rand(8) * 4 + 1), nn.Parameter(torch.rand(8))
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
        h = c = x.new_zeros(x.shape[0], 8)
        outputs = []
        for step in range(x.shape[1]):
            new_h, new_c = self.cell(x[:, step], (h, c))
            phase = torch.fmod(times[:, step, None] + self.phase, self.period) / self.period
            opening = torch.where(phase < 0.3, 2 - phase / 0.15, 0.01 * phase)
            gate = torch.where(phase < 0.15, phase / 0.15, opening)
            c = gate * new_c + (1 - gate) * c
            h = gate * new_h + (1 - gate) * h
            outputs.append(h)
        return self.out(torch.stack(outputs, 1)), h


class Scale(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tensor(0.5)


class TwoPasses(nn.Module):
    """Both passes write into one tensor; units run every so many steps, and a module makes a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner, self.out = Scale(), nn.Linear(6, 8), nn.Linear(16, 4)
        self.register_buffer("periods", torch.tensor([1, 1, 1, 2, 2, 2, 4, 4]))
        self.periods: Tensor

    def forward(self, x: Tensor) -> Tensor:
        inner = self.inner(x)
        states = inner.new_zeros(x.shape[0], x.shape[1], 2, 8)
        for direction in range(2):
            state = inner.new_zeros(x.shape[0], 8)
            for step in range(x.shape[1]) if direction == 0 else range(x.shape[1] - 1, -1, -1):
                runs = (step % self.periods == 0).float()
                state = runs * torch.tanh(inner[:, step] + self.scale(state)) + (1 - runs) * state
                states[:, step, direction] = state
        return self.out(states.flatten(2))


@dataclass(frozen=True)
class PublicLoop:
    """A model and what makes its inputs for (steps, batch)."""

    make: Callable[[], nn.Module]
    inputs_of: Callable[[int, int], tuple[Tensor, ...]]

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make().eval()

    def inputs(self, steps: int, batch: int = 2, *, seed: int = 0) -> tuple[Tensor, ...]:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return self.inputs_of(steps, batch)


def _values(steps: int, batch: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, steps, 6),)


def _values_and_words(steps: int, batch: int) -> tuple[Tensor, ...]:
    return torch.randn(batch, 4, 6), torch.randint(12, (batch, steps))


def _packed(steps: int, batch: int) -> tuple[Tensor, ...]:
    lengths = torch.cat([torch.tensor([5]), torch.randint(1, 6, (batch - 1,))])
    return torch.randn(batch, 5, 6), lengths, torch.randint(12, (batch, steps))


def _masked(steps: int, batch: int) -> tuple[Tensor, ...]:
    lengths = torch.randint(1, steps + 1, (batch, 1))
    return torch.randn(batch, steps, 6), torch.arange(steps) < lengths


PUBLIC_LOOPS: Mapping[str, PublicLoop] = {
    "selective_scan": PublicLoop(SelectiveScan, _values),
    "scan_in_a_function": PublicLoop(lambda: SelectiveScan(_selective_scan), _values),
    "linear_recurrence": PublicLoop(LinearRecurrence, _values),
    "raw_lstm": PublicLoop(RawLSTM, _values),
    "packed_encoder": PublicLoop(PackedEncoder, _packed),
    "location_sensitive": PublicLoop(
        LocationSensitive, lambda n, b: (torch.randn(b, 4, 8), torch.randn(b, n, 5))
    ),
    "writes_steps": PublicLoop(WritesSteps, _values_and_words),
    "pointer_network": PublicLoop(PointerNetwork, lambda n, b: (torch.rand(b, n, 2),)),
    "pointer_in_place": PublicLoop(
        lambda: PointerNetwork(in_place=True), lambda n, b: (torch.rand(b, n, 2),)
    ),
    "one_hot": PublicLoop(OneHot, _values_and_words),
    "every_second": PublicLoop(EverySecond, _values),
    "breaks_off": PublicLoop(BreaksOff, _values),
    "cell_of_ones_own": PublicLoop(CellOfOnesOwn, _values),
    "time_mixing": PublicLoop(TimeMixing, _values),
    "conv_lstm": PublicLoop(ConvLSTM, lambda n, b: (torch.randn(b, n, 2, 4, 4),)),
    "decaying_gru": PublicLoop(
        DecayingGRU,
        lambda n, b: (
            torch.stack([torch.randn(b, n, 6), torch.rand(b, n, 6).round(), torch.rand(b, n, 6)], 1),
        ),
    ),
    "euler_steps": PublicLoop(EulerSteps, lambda n, b: (torch.randn(b, 8), torch.linspace(0, 1, max(n, 2)))),
    "fast_weights": PublicLoop(FastWeights, _values),
    "forget_mult": PublicLoop(ForgetMult, _values),
    "both_directions": PublicLoop(BothDirections, _values),
    "forward_algorithm": PublicLoop(ForwardAlgorithm, _masked),
    "positions": PublicLoop(Positions, _values),
    "stacked_steps": PublicLoop(StackedSteps, _values),
    "writes_parts": PublicLoop(WritesParts, _values),
    "with_variable": PublicLoop(WithVariable, _values),
    "two_passes": PublicLoop(TwoPasses, _values),
    "phased_lstm": PublicLoop(PhasedLSTM, lambda n, b: (torch.randn(b, n, 6), torch.rand(b, n).cumsum(1))),
}
