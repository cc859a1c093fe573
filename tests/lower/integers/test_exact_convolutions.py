"""The package's convolutions and oneDNN's, in processes that are held to older instructions: the same bits.

A CPU that has VNNI runs the package's own; oneDNN's, which are exact there, where only the former are held.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.once import SEED
from tests.helpers.warm_python import warm_python
from torchq_compat.lower.integers import operators

#: What the package's loops are held to, and oneDNN.
HELD = (("avx512_vnni", "AVX2"), ("avx2", "AVX2"), ("sse2", "AVX2"), ("avx2", "DEFAULT"))
#: Groups, inputs and outputs of a group: whole, of more columns than a block has, grouped, depthwise.
CHANNELS = ((1, 3, 5), (1, 16, 33), (1, 80, 130), (1, 600, 16), (2, 9, 20), (12, 2, 3), (6, 3, 1), (70, 1, 1))


def calls() -> Iterator[tuple[Any, ...]]:
    """Yield arguments of ``convolution``: every integer of both operands, with every kind of window."""
    draw, generator = random.Random(SEED), torch.Generator().manual_seed(SEED)

    def integers(*shape: int, low: int = 0) -> Tensor:
        return torch.randint(low, low + 256, shape, generator=generator)

    for rank, (groups, inputs, outputs) in itertools.product((1, 2, 3), 4 * CHANNELS):
        kernel, stride, padding, dilation = (
            [draw.randint(low, high) for _ in range(rank)] for low, high in ((1, 3), (1, 3), (0, 3), (1, 2))
        )
        sizes = [draw.randint(1 + d * (k - 1), 9) for k, d in zip(kernel, dilation, strict=True)]
        # Where windows read nothing but padding, torch's own convolution may end the process (2.13).
        padding = [
            p if p <= d * (k - 1) or size > 2 else 0
            for p, d, k, size in zip(padding, dilation, kernel, sizes, strict=True)
        ]
        x, zero_point = integers(2, groups * inputs, *sizes).to(torch.uint8), draw.choice((0, 3, 128, 255))
        if draw.random() < 0.5:  # a few integers above 127: oneDNN computes the rest
            x = torch.where(torch.rand(x.shape, generator=generator) < 0.01, x, x // 2)
        if draw.random() < 0.5:
            x, zero_point = (x.int() - 128).to(torch.int8), zero_point - 128
        if draw.random() < 0.5:
            x = x.movedim(1, -1).contiguous().movedim(-1, 1)
        weight = integers(groups * outputs, inputs, *kernel, low=-128).to(torch.int8)
        scales = torch.rand(len(weight), generator=generator) * 0.01 + 0.001
        bias = torch.randn(len(weight), generator=generator) if draw.random() < 0.7 else None
        step = 90 * 128 * 0.0005 * 0.02 * weight[0].numel() ** 0.5
        ends = draw.choice(
            [(step, 100, 0, 255, "uint8"), (step, 101, 101, 250, "uint8"), (step, -5, -60, 127, "int8")]
        )
        yield x, 0.02, zero_point, weight, scales, bias, stride, padding, dilation, groups, *ends


def write(folder: str) -> None:
    """Write the results with each instruction set, each in a process of its own, for one import of torch."""
    context = multiprocessing.get_context("fork")
    for own, onednn in HELD:
        process = context.Process(target=write_held, args=(own, onednn, Path(folder, own + onednn)))
        process.start()
        process.join()
        assert process.exitcode == 0, own


def write_held(own: str, onednn: str, path: Path) -> None:
    # Each is read at the first call, which no process that forks has made.
    os.environ["TORCHQ_COMPAT_INSTRUCTION_SET"], os.environ["ONEDNN_MAX_CPU_ISA"] = own, onednn
    torch.save([operators.CONVOLUTION(*args) for args in calls()], path)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("held")
    done = warm_python("-c", f"from {__name__} import write; write({str(folder)!r})")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize(("own", "onednn"), HELD)
def test_bits_of_older_instructions(own: str, onednn: str, written: Path) -> None:
    apart = total = 0
    for found, args in zip(torch.load(written / (own + onednn)), calls(), strict=True):
        expected = operators.CONVOLUTION(*args)
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        off = (found.int() - expected.int()).abs()
        assert not off.numel() or int(off.max()) <= 1, args[6:]
        apart, total = apart + int((off > 0).sum()), total + off.numel()
        exact = operators.convolution(*args)
        assert not off.numel() or int((found.int() - exact.int()).abs().max()) <= 1, args[6:]
    # oneDNN rounds in the same order, but in the kernels of a few shapes.
    assert apart <= total * 1e-4
    assert total > 50_000


@pytest.mark.parametrize("dim", range(3))
def test_windows_that_read_nothing_but_padding(dim: int) -> None:
    """Along one dimension they lie before and behind the input: there oneDNN's kernel ends the process."""
    sizes, kernel, padding = [7, 7, 7], [1, 2, 1], [0, 0, 0]
    sizes[dim] = kernel[dim] = padding[dim] = 1
    x = torch.randint(-128, 128, (2, 18, *sizes), dtype=torch.int8)
    weight, bias = (
        torch.randint(-128, 128, (6, 3, *kernel), dtype=torch.int8),
        torch.tensor([-9, -2, -1, 0, 1, 2.0]),
    )
    windows = [2] * 3, padding, [2] * 3, 6
    found = operators.CONVOLUTION(
        x, 0.02, 127, weight, torch.ones(6), bias, *windows, 0.5, 10, 0, 255, "uint8"
    )
    assert found[0, :, 0, 0, 0].tolist() == [0, 6, 8, 10, 12, 14]
    assert torch.equal(found, found[:1, :, :1, :1, :1].expand(found.shape))
