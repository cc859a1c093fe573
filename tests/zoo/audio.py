"""Audio models with recurrent modules between convolutions: small, after their public definitions."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from tests.zoo.entry import Entry

__all__ = ["audio_models"]


class StreamableConv1d(nn.Module):
    """encodec's: a weight-normed convolution with causal reflection padding."""

    def __init__(self, n_in: int, n_out: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = weight_norm(nn.Conv1d(n_in, n_out, kernel, stride))
        self.kernel, self.stride = kernel, stride

    def forward(self, x: Tensor) -> Tensor:
        padding_total = self.kernel - self.stride
        length = x.shape[-1]
        n_frames = (length - self.kernel + padding_total) / self.stride + 1
        ideal_length = (math.ceil(n_frames) - 1) * self.stride + (self.kernel - padding_total)
        return self.conv(F.pad(x, (padding_total, ideal_length - length), "reflect"))


class StreamableLSTM(nn.Module):
    def __init__(self, width: int, layers: int = 2) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, layers)

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(2, 0, 1)
        y, _ = self.lstm(x)
        y = y + x
        return y.permute(1, 2, 0)


class SEANetBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.ELU(), StreamableConv1d(width, width // 2, 3), nn.ELU(), StreamableConv1d(width // 2, width, 1)
        )
        self.shortcut = StreamableConv1d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.shortcut(x) + self.block(x)


def encodec_encoder() -> nn.Module:
    """facebookresearch/encodec's SEANet encoder: strided convolutions, residual blocks, an LSTM."""
    return nn.Sequential(
        *(StreamableConv1d(1, 8, 7), SEANetBlock(8), nn.ELU(), StreamableConv1d(8, 16, 4, 2)),
        *(SEANetBlock(16), nn.ELU(), StreamableConv1d(16, 32, 8, 4)),
        *(StreamableLSTM(32), nn.ELU(), StreamableConv1d(32, 16, 7)),
    )


class BLSTM(nn.Module):
    def __init__(self, dim: int, bidirectional: bool) -> None:
        super().__init__()
        self.lstm = nn.LSTM(dim, dim, 2, bidirectional=bidirectional)
        self.linear = nn.Linear(2 * dim, dim) if bidirectional else None

    def forward(self, x: Tensor, hidden: tuple[Tensor, Tensor] | None = None) -> Tensor:
        x = x.permute(2, 0, 1)
        x, hidden = self.lstm(x, hidden)
        if self.linear is not None:
            x = self.linear(x)
        return x.permute(1, 2, 0)


class WaveUNet(nn.Module):
    """Demucs (v2) and denoiser: strided convolutions with GLU, an LSTM in the middle, skips, the way back."""

    def __init__(self, bidirectional: bool, normalize: bool, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.kernel, self.stride, self.depth, self.normalize = 8, 4, depth, normalize
        self.encoder, self.decoder = nn.ModuleList(), nn.ModuleList()
        n_in = 1
        for index in range(depth):
            hidden = width * 2**index
            self.encoder.append(
                nn.Sequential(
                    *(nn.Conv1d(n_in, hidden, self.kernel, self.stride), nn.ReLU()),
                    *(nn.Conv1d(hidden, hidden * 2, 1), nn.GLU(1)),
                )
            )
            decode: list[nn.Module] = [
                nn.Conv1d(hidden, 2 * hidden, 1),
                nn.GLU(1),
                nn.ConvTranspose1d(hidden, n_in, self.kernel, self.stride),
            ]
            self.decoder.insert(0, nn.Sequential(*decode, *([nn.ReLU()] if index > 0 else [])))
            n_in = hidden
        self.lstm = BLSTM(n_in, bidirectional)

    def valid_length(self, length: int) -> int:
        """Return the least length from ``length`` on that all convolutions cover in whole strides."""
        for _ in range(self.depth):
            length = math.ceil((length - self.kernel) / self.stride) + 1
            length = max(length, 1)
        for _ in range(self.depth):
            length = (length - 1) * self.stride + self.kernel
        return int(length)

    def forward(self, mix: Tensor) -> Tensor:
        std: Tensor | float = 1.0
        if self.normalize:
            std = mix.mean(dim=1, keepdim=True).std(dim=-1, keepdim=True)
            mix = mix / (1e-3 + std)
        length = mix.shape[-1]
        x = F.pad(mix, (0, self.valid_length(length) - length))
        skips = []
        for encode in self.encoder:
            x = encode(x)
            skips.append(x)
        x = self.lstm(x)
        for decode in self.decoder:
            skip = skips.pop(-1)
            x = decode(x + skip[..., : x.shape[-1]])
        return std * x[..., :length]


def demucs() -> nn.Module:
    return WaveUNet(bidirectional=True, normalize=False)


def denoiser() -> nn.Module:
    return WaveUNet(bidirectional=False, normalize=True)


def audio_models() -> Iterator[Entry]:
    for name, source, make in (
        ("encodec_encoder", "facebookresearch/encodec", encodec_encoder),
        ("demucs", "facebookresearch/demucs v2", demucs),
        ("denoiser", "facebookresearch/denoiser", denoiser),
    ):
        yield Entry(
            name,
            source,
            make,
            lambda batch, samples: (torch.randn(batch, 1, samples),),
            {"batch": 2, "samples": 500},
            ({"batch": 1}, {"samples": 700}, {"batch": 3, "samples": 333}),
            is_recurrent=True,
        )
