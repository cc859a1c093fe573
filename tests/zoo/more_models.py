"""Models of other kinds, chosen for this zoo: small, after their public definitions."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from tests.zoo.entry import Entry, Inputs

__all__ = ["more_models"]


def double_conv(n_in: int, n_out: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(n_in, n_out, 3, padding=1, bias=False), nn.BatchNorm2d(n_out), nn.ReLU(inplace=True)),
        *(nn.Conv2d(n_out, n_out, 3, padding=1, bias=False), nn.BatchNorm2d(n_out), nn.ReLU(inplace=True)),
    )


class UNet(nn.Module):
    """milesial/Pytorch-UNet: the way up pads by the difference of the sizes, in Python."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inc, self.down1 = double_conv(3, width), double_conv(width, 2 * width)
        self.down2, self.pool = double_conv(2 * width, 4 * width), nn.MaxPool2d(2)
        self.up1, self.conv1 = (
            nn.ConvTranspose2d(4 * width, 2 * width, 2, 2),
            double_conv(4 * width, 2 * width),
        )
        self.up2 = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        self.conv2, self.outc = double_conv(3 * width, width), nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x1 = self.inc(x)
        x2 = self.down1(self.pool(x1))
        x3 = self.down2(self.pool(x2))
        x = self.conv1(self._beside(self.up1(x3), x2))
        x = self.conv2(self._beside(self.up2(x), x1))
        return self.outc(x)

    @staticmethod
    def _beside(x1: Tensor, x2: Tensor) -> Tensor:
        diffY, diffX = x2.size()[2] - x1.size()[2], x2.size()[3] - x1.size()[3]
        x1 = F.pad(x1, [diffX // 2, diffX - diffX // 2, diffY // 2, diffY - diffY // 2])
        return torch.cat([x2, x1], dim=1)


class TransformNet(nn.Module):
    def __init__(self, k: int, width: int) -> None:
        super().__init__()
        self.k = k
        self.conv1, self.conv2 = nn.Conv1d(k, width, 1), nn.Conv1d(width, 2 * width, 1)
        self.fc1, self.fc2 = nn.Linear(2 * width, width), nn.Linear(width, k * k)
        self.bn1, self.bn2, self.bn3 = nn.BatchNorm1d(width), nn.BatchNorm1d(2 * width), nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        batchsize = x.size()[0]
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        x = torch.max(x, 2, keepdim=True)[0]
        x = x.view(batchsize, -1)
        x = self.fc2(F.relu(self.bn3(self.fc1(x))))
        iden = torch.eye(self.k).flatten().view(1, self.k * self.k).repeat(batchsize, 1)
        return (x + iden).view(-1, self.k, self.k)


class PointNet(nn.Module):
    """fxia22/pointnet.pytorch's classifier: a learned rotation, a maximum over the points."""

    def __init__(self, width: int = 16, classes: int = 8) -> None:
        super().__init__()
        self.stn = TransformNet(3, width)
        self.conv1, self.conv2 = nn.Conv1d(3, width, 1), nn.Conv1d(width, 4 * width, 1)
        self.bn1, self.bn2, self.bn3 = nn.BatchNorm1d(width), nn.BatchNorm1d(4 * width), nn.BatchNorm1d(width)
        self.fc1, self.fc2, self.dropout = (
            nn.Linear(4 * width, width),
            nn.Linear(width, classes),
            nn.Dropout(0.3),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        trans = self.stn(x)
        x = x.transpose(2, 1)
        x = torch.bmm(x, trans)
        x = x.transpose(2, 1)
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.bn2(self.conv2(x))
        x = torch.max(x, 2, keepdim=True)[0].view(x.size(0), -1)
        x = F.relu(self.bn3(self.dropout(self.fc1(x))))
        return F.log_softmax(self.fc2(x), dim=1), trans


class TemporalBlock(nn.Module):
    def __init__(self, n_in: int, n_out: int, kernel: int, dilation: int) -> None:
        super().__init__()
        self.padding = (kernel - 1) * dilation
        self.conv1 = weight_norm(nn.Conv1d(n_in, n_out, kernel, padding=self.padding, dilation=dilation))
        self.conv2 = weight_norm(nn.Conv1d(n_out, n_out, kernel, padding=self.padding, dilation=dilation))
        self.downsample = nn.Conv1d(n_in, n_out, 1) if n_in != n_out else None
        self.relu, self.dropout = nn.ReLU(), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        out = self.dropout(self.relu(self.conv1(x)[:, :, : -self.padding].contiguous()))
        out = self.dropout(self.relu(self.conv2(out)[:, :, : -self.padding].contiguous()))
        res = x if self.downsample is None else self.downsample(x)
        return self.relu(out + res)


class TCN(nn.Module):
    """locuslab/TCN: dilated causal convolutions under weight norm, cut to length."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.network = nn.Sequential(
            *(TemporalBlock(4 if i == 0 else width, width, 3, 2**i) for i in range(3))
        )
        self.linear = nn.Linear(width, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        y1 = self.network(inputs)
        return F.log_softmax(self.linear(y1[:, :, -1]), dim=1)


class ConvLSTM(nn.Module):
    """ndrplz/ConvLSTM_pytorch: gates by one convolution over input and state, a loop over five frames."""

    def __init__(self, n_in: int = 2, hidden: int = 8) -> None:
        super().__init__()
        self.hidden_dim = hidden
        self.conv = nn.Conv2d(n_in + hidden, 4 * hidden, 3, padding=1)
        self.head = nn.Conv2d(hidden, 1, 1)

    def forward(self, frames: Tensor) -> Tensor:
        b, seq_len, _, height, width = frames.size()
        h = torch.zeros(b, self.hidden_dim, height, width)
        c = torch.zeros(b, self.hidden_dim, height, width)
        outputs = []
        for t in range(seq_len):
            combined = torch.cat([frames[:, t, :, :, :], h], dim=1)
            cc_i, cc_f, cc_o, cc_g = torch.split(self.conv(combined), self.hidden_dim, dim=1)
            i, f, o = torch.sigmoid(cc_i), torch.sigmoid(cc_f), torch.sigmoid(cc_o)
            c = f * c + i * torch.tanh(cc_g)
            h = o * torch.tanh(c)
            outputs.append(self.head(h))
        return torch.stack(outputs, dim=1)


def dcgan_generator() -> nn.Module:
    """pytorch/examples dcgan: transposed convolutions from a vector to an image."""
    return nn.Sequential(
        *(nn.ConvTranspose2d(16, 32, 4, 1, 0, bias=False), nn.BatchNorm2d(32), nn.ReLU(True)),
        *(nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(True)),
        *(nn.ConvTranspose2d(16, 8, 4, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(True)),
        *(nn.ConvTranspose2d(8, 3, 4, 2, 1, bias=False), nn.Tanh()),
    )


class SeparableConv(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False)
        self.pointwise, self.bn = nn.Conv2d(width, width, 1), nn.BatchNorm2d(width, momentum=0.01, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.bn(self.pointwise(self.depthwise(x))))


class BiFPN(nn.Module):
    """EfficientDet's: three levels, fast normalized fusion with learned weights, up and down."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.reduce = nn.ModuleList(nn.Conv2d(n, width, 1) for n in (8, 12, 16))
        self.td1, self.td2, self.out2, self.out3 = (SeparableConv(width) for _ in range(4))
        self.w1, self.w2 = nn.Parameter(torch.rand(2, 2) + 0.5), nn.Parameter(torch.rand(3, 2) + 0.5)

    def forward(self, p3: Tensor, p4: Tensor, p5: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        p3, p4, p5 = (reduce(p) for reduce, p in zip(self.reduce, (p3, p4, p5), strict=True))
        w1 = F.relu(self.w1)
        w1 = w1 / (torch.sum(w1, dim=0) + 1e-4)
        w2 = F.relu(self.w2)
        w2 = w2 / (torch.sum(w2, dim=0) + 1e-4)
        p4_td = self.td1(w1[0, 0] * p4 + w1[1, 0] * F.interpolate(p5, scale_factor=2, mode="nearest"))
        p3_out = self.td2(w1[0, 1] * p3 + w1[1, 1] * F.interpolate(p4_td, scale_factor=2, mode="nearest"))
        p4_out = self.out2(w2[0, 0] * p4 + w2[1, 0] * p4_td + w2[2, 0] * F.max_pool2d(p3_out, 2))
        p5_out = self.out3(w2[0, 1] * p5 + w2[1, 1] * F.max_pool2d(p4_out, 2))
        return p3_out, p4_out, p5_out


class VAE(nn.Module):
    """AntixK/PyTorch-VAE's vanilla one in evaluation: the decoder gets the mean."""

    def __init__(self, latent: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.LeakyReLU()),
            *(nn.Conv2d(8, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.LeakyReLU()),
        )
        self.fc_mu, self.fc_var = nn.Linear(16 * 16, latent), nn.Linear(16 * 16, latent)
        self.decoder_input = nn.Linear(latent, 16 * 16)
        self.decoder = nn.Sequential(
            *(nn.ConvTranspose2d(16, 8, 3, 2, 1, output_padding=1), nn.BatchNorm2d(8), nn.LeakyReLU()),
            *(nn.ConvTranspose2d(8, 8, 3, 2, 1, output_padding=1), nn.BatchNorm2d(8), nn.LeakyReLU()),
            *(nn.Conv2d(8, 3, 3, padding=1), nn.Tanh()),
        )

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        result = torch.flatten(self.encoder(input), start_dim=1)
        mu, log_var = self.fc_mu(result), self.fc_var(result)
        z = mu
        if self.training:
            std = torch.exp(0.5 * log_var)
            z = torch.randn_like(std) * std + mu
        result = self.decoder_input(z).view(-1, 16, 4, 4)
        return self.decoder(result), mu, log_var


class DLRM(nn.Module):
    """facebookresearch/dlrm: embedding bags, a bottom MLP, pairwise products, a top MLP."""

    def __init__(self, width: int = 16, tables: int = 3) -> None:
        super().__init__()
        self.emb_l = nn.ModuleList(nn.EmbeddingBag(50, width, mode="sum") for _ in range(tables))
        self.bot_l = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, width), nn.ReLU())
        n = tables + 1
        self.top_l = nn.Sequential(
            nn.Linear(width + n * (n - 1) // 2, 32), nn.ReLU(), nn.Linear(32, 1), nn.Sigmoid()
        )

    def forward(self, dense_x: Tensor, indices: Tensor) -> Tensor:
        x = self.bot_l(dense_x)
        ly = [emb(indices[:, k]) for k, emb in enumerate(self.emb_l)]
        batch_size, d = x.shape
        T = torch.cat([x, *ly], dim=1).view((batch_size, -1, d))
        Z = torch.bmm(T, torch.transpose(T, 1, 2))
        ni = len(ly) + 1
        li = torch.tensor([i for i in range(ni) for j in range(i)])
        lj = torch.tensor([j for i in range(ni) for j in range(i)])
        return self.top_l(torch.cat([x, Z[:, li, lj]], dim=1))


class CausalAttention(nn.Module):
    def __init__(self, n_embd: int, n_head: int, block_size: int) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.n_head, self.n_embd = n_head, n_embd
        self.register_buffer("bias", torch.tril(torch.ones(block_size, block_size))[None, None])

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        y = F.softmax(att, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class MinGPT(nn.Module):
    """karpathy/minGPT: a transformer decoder with a mask cut to length."""

    def __init__(self, width: int = 32, words: int = 40, block_size: int = 32) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(words, width), nn.Embedding(block_size, width)
        self.ln = nn.ModuleList(nn.LayerNorm(width) for _ in range(5))
        self.attn = nn.ModuleList(CausalAttention(width, 4, block_size) for _ in range(2))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(2)
        )
        self.lm_head = nn.Linear(width, words, bias=False)

    def forward(self, idx: Tensor) -> Tensor:
        _, t = idx.size()
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device).unsqueeze(0)
        x = self.wte(idx) + self.wpe(pos)
        for i in range(2):
            x = x + self.attn[i](self.ln[2 * i](x))
            x = x + self.mlp[i](self.ln[2 * i + 1](x))
        return self.lm_head(self.ln[4](x))


class WaveNet(nn.Module):
    """r9y9/wavenet_vocoder's shape: dilated gated convolutions, residual and skip sums."""

    def __init__(self, width: int = 16, layers: int = 4) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, width, 1)
        self.dilated = nn.ModuleList(
            nn.Conv1d(width, 2 * width, 2, padding=2**i, dilation=2**i) for i in range(layers)
        )
        self.out, self.skip = (
            nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(layers)) for _ in range(2)
        )
        self.last = nn.Sequential(nn.ReLU(), nn.Conv1d(width, width, 1), nn.ReLU(), nn.Conv1d(width, 20, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        skips: Tensor | int = 0
        for dilated, out, skip in zip(self.dilated, self.out, self.skip, strict=True):
            residual = x
            y = dilated(x)[:, :, : residual.size(-1)]
            a, b = y.split(y.size(1) // 2, dim=1)
            y = torch.tanh(a) * torch.sigmoid(b)
            skips = skips + skip(y)
            x = (out(y) + residual) * math.sqrt(0.5)
        return self.last(skips)


def _pyramid(batch: int, side: int) -> Inputs:
    return tuple(
        torch.randn(batch, n, s, s) for n, s in zip((8, 12, 16), (4 * side, 2 * side, side), strict=True)
    )


def more_models() -> Iterator[Entry]:
    batches = ({"batch": 1}, {"batch": 5})
    yield Entry(
        "unet",
        "milesial/Pytorch-UNet",
        UNet,
        lambda batch, height, width: (torch.randn(batch, 3, height, width),),
        {"batch": 2, "height": 32, "width": 32},
        (*batches, {"height": 38, "width": 45}),
    )
    yield Entry(
        "pointnet",
        "fxia22/pointnet.pytorch",
        PointNet,
        lambda batch, points: (torch.randn(batch, 3, points),),
        {"batch": 4, "points": 32},
        (*batches, {"points": 50}),
    )
    yield Entry(
        "tcn",
        "locuslab/TCN",
        TCN,
        lambda batch, length: (torch.randn(batch, 4, length),),
        {"batch": 3, "length": 20},
        (*batches, {"length": 31}),
    )
    yield Entry(
        "conv_lstm",
        "ndrplz/ConvLSTM_pytorch",
        ConvLSTM,
        lambda batch, length, side: (torch.randn(batch, length, 2, side, side),),
        {"batch": 2, "length": 5, "side": 10},
        (*batches, {"length": 3}, {"length": 8}, {"side": 12}),
    )
    yield Entry(
        "dcgan_generator",
        "pytorch/examples",
        dcgan_generator,
        lambda batch: (torch.randn(batch, 16, 1, 1),),
        {"batch": 3},
        batches,
    )
    yield Entry("bifpn", "Tan et al. 2020", BiFPN, _pyramid, {"batch": 2, "side": 4}, (*batches, {"side": 6}))
    yield Entry(
        "vae",
        "AntixK/PyTorch-VAE",
        VAE,
        lambda batch: (torch.randn(batch, 3, 16, 16),),
        {"batch": 3},
        batches,
    )
    yield Entry(
        "dlrm",
        "facebookresearch/dlrm",
        DLRM,
        lambda batch, bag: (torch.randn(batch, 13), torch.randint(0, 50, (batch, 3, bag))),
        {"batch": 4, "bag": 3},
        (*batches, {"bag": 2}),
    )
    yield Entry(
        "min_gpt",
        "karpathy/minGPT",
        MinGPT,
        lambda batch, length: (torch.randint(0, 40, (batch, length)),),
        {"batch": 2, "length": 12},
        (*batches, {"length": 7}),
    )
    yield Entry(
        "wavenet",
        "r9y9/wavenet_vocoder",
        WaveNet,
        lambda batch, length: (torch.randn(batch, 1, length),),
        {"batch": 2, "length": 40},
        (*batches, {"length": 64}),
    )
