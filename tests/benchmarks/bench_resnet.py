"""Time to prepare a model of the size of ResNet-18: this package against torch.export plus FX's prepare.

    python -m tests.benchmarks.bench_resnet [--repeat N] [--json FILE] [--profile]

Only the ratios mean anything: these are wall-clock seconds on any machine. Prepare has to export, with every
dimension free, as in an FX graph; so the limit is the time of ``torch.export.export`` with free dimensions
plus that of FX's ``prepare_fx``. An export with all sizes fixed is shown beside it.
"""

from __future__ import annotations

import argparse
import copy
import cProfile
import gc
import json
import pstats
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.ao.quantization.quantize_fx as fx
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig_mapping

import torchq_compat as tc
from torchq_compat.capture.torch_export import capture_freely

WIDTHS = (64, 64, 128, 128, 256, 256, 512, 512)


class Block(nn.Module):
    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        stride = 1 if inputs == width else 2
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = (
            nn.Sequential(nn.Conv2d(inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width))
            if stride > 1
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += self.downsample(x)
        result: Tensor = self.relu(y)
        return result


class ResNet18(nn.Module):
    """20 convolutions, 11.7 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        self.blocks = nn.Sequential(
            *(Block(inputs, width) for inputs, width in zip((64, *WIDTHS), WIDTHS, strict=False))
        )
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.blocks(self.stem(x)))
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3, help="runs per number; the fastest counts")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--profile", action="store_true", help="show where our prepare spends its time")
    options = parser.parse_args()
    seconds = measure(options.repeat)
    show(seconds)
    if options.json:
        options.json.write_text(json.dumps(seconds, indent=2))
    if options.profile:
        profile()


def measure(repeat: int) -> dict[str, float]:
    """Return the seconds of each, and the ratio ours / (export + FX) for both kinds of export."""
    model, inputs = ResNet18().eval(), (torch.randn(1, 3, 64, 64),)
    mapping = get_default_qconfig_mapping("x86")
    seconds = {
        "fixed export": fastest(repeat, lambda: torch.export.export(model, inputs)),
        "export": fastest(repeat, lambda: capture_freely(model, inputs)),
        "fx": fastest(repeat, lambda: fx.prepare_fx(copy.deepcopy(model), mapping, inputs)),
        "ours": fastest(repeat, lambda: tc.prepare_fx(model, mapping, inputs)),
    }
    ratios = {
        f"ratio, {kind}": seconds["ours"] / (seconds[kind] + seconds["fx"])
        for kind in ("export", "fixed export")
    }
    return {**seconds, **ratios}


def fastest(repeat: int, run: Callable[[], Any]) -> float:
    taken = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(repeat):
            gc.collect()
            started = time.perf_counter()
            run()
            taken.append(time.perf_counter() - started)
    return min(taken)


def show(seconds: dict[str, float]) -> None:
    table = Table(title="prepare of ResNet-18, seconds (fastest run)")
    for column in seconds:
        table.add_column(column, justify="right")
    table.add_row(*(f"{value:.3f}" for value in seconds.values()))
    Console(width=120).print(table)


def profile() -> None:
    model, inputs = ResNet18().eval(), (torch.randn(1, 3, 64, 64),)
    profiler = cProfile.Profile()
    profiler.runcall(tc.prepare_fx, model, get_default_qconfig_mapping("x86"), inputs)
    pstats.Stats(profiler).sort_stats("cumulative").print_stats(45)


if __name__ == "__main__":
    main()
