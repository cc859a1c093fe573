"""Calibrate the same batches in one process and, as shards, in several with ``merge_observers``.

``python -m tests.benchmarks.bench_processes --ranks 2`` prints the seconds of both, and their ratio.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.ao.quantization import get_default_qconfig_mapping

import torchq_compat as tc
from tests.helpers.processes import device, in_processes

BATCH = (32, 3, 64, 64)


def model() -> nn.Module:
    """Return three convolutions and a linear layer, each with a HistogramObserver."""
    torch.manual_seed(0)
    widths = (3, 16, 32, 64)
    layers: list[nn.Module] = []
    for narrow, wide in pairwise(widths):
        layers += [nn.Conv2d(narrow, wide, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)).eval()


def calibrate(rank: int, ranks: int, batches: int) -> dict[str, Any]:
    """Return the seconds of this rank's share of ``batches`` batches, merging included, and of merging."""
    torch.manual_seed(1)
    x = torch.randn(BATCH, device=device(rank))
    prepared = tc.prepare_fx(model().to(device(rank)), get_default_qconfig_mapping("x86"), (x,))
    prepared(x)  # warm up
    dist.barrier()
    started = time.perf_counter()
    with torch.no_grad():
        for number in range(rank, batches, ranks):
            prepared(x * (1 + number / batches))
    calibrated = time.perf_counter()
    if ranks > 1:
        tc.merge_observers(prepared)
    dist.barrier()
    return {"seconds": time.perf_counter() - started, "merge": time.perf_counter() - calibrated}


def measure(ranks: int, batches: int) -> dict[str, float]:
    """Return seconds of one process and of ``ranks`` processes, their ratio, and the seconds of merging."""
    taken = {}
    for count in (1, ranks):
        with tempfile.TemporaryDirectory() as folder:
            taken[count] = in_processes(calibrate, count, Path(folder), batches)
    one, several = (max(result["seconds"] for result in taken[count]) for count in (1, ranks))
    merge = min(result["merge"] for result in taken[ranks])
    return {"one": one, "several": several, "ratio": several / one, "merge": merge}


def main() -> None:
    """Print the seconds and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batches", type=int, default=64)
    options = parser.parse_args()
    row = measure(options.ranks, options.batches)
    print(
        f"{options.batches} batches: one process {row['one']:.2f} s, {options.ranks} processes "
        f"{row['several']:.2f} s (merging {row['merge']:.2f} s), ratio {row['ratio']:.2f}"
    )


if __name__ == "__main__":
    main()
