"""Prepare, calibrate and convert: FX and torchq_compat side by side in one run.

    python -m tests.benchmarks.bench_prepare [--repeat N] [--json FILE]

Only the ratios mean anything: these are wall-clock seconds on whatever machine this is. FX has one observer
set for all steps and so have we; what is expected is the same time at every T, and calibration per step no
slower than FX's.
"""

from __future__ import annotations

import argparse
import copy
import json
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
from tests.oracle import CONVERT_LSTM, MAP_LSTM

LENGTHS = (8, 128, 1024)
STAGES = ("prepare", "calibrate", "convert")


class Model(nn.Module):
    """Two layers of 64, batch 4, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(64, 64, 2)
        self.head = nn.Linear(64, 16)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Tensor:
        output, _ = self.lstm(x, (h, c))
        result: Tensor = self.head(output)
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3, help="runs per number; the fastest counts")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    options = parser.parse_args()
    rows = [measure(length, options.repeat) for length in LENGTHS]
    show(rows)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))


def measure(length: int, repeat: int) -> dict[str, Any]:
    """Seconds per stage at one sequence length, for both flows."""
    torch.manual_seed(0)
    inputs = (torch.randn(length, 4, 64), torch.zeros(2, 4, 64), torch.zeros(2, 4, 64))
    model = Model().eval()
    runs = {
        "fx": lambda: run(fx.prepare_fx, fx.convert_to_reference_fx, copy.deepcopy(model), inputs),
        "ours": lambda: run(tc.prepare_fx, tc.convert_to_reference_fx, model, inputs),
    }
    row: dict[str, Any] = {"T": length}
    for name, once in runs.items():
        results = [once() for _ in range(repeat)]
        row[name] = {stage: min(result[stage] for result in results) for stage in STAGES}
    return row


def run(
    prepare: Callable[..., Any], convert: Callable[..., Any], model: nn.Module, inputs: tuple[Tensor, ...]
) -> dict[str, float]:
    mapping = get_default_qconfig_mapping("x86")
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        started = time.perf_counter()
        prepared = prepare(model, mapping, inputs, MAP_LSTM)
        prepared_at = time.perf_counter()
        prepared(*inputs)
        calibrated_at = time.perf_counter()
        convert(prepared, CONVERT_LSTM)
        converted_at = time.perf_counter()
    return {
        "prepare": prepared_at - started,
        "calibrate": calibrated_at - prepared_at,
        "convert": converted_at - calibrated_at,
    }


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="seconds (fastest run); ratio = ours / FX")
    table.add_column("T", justify="right")
    for stage in STAGES:
        for column in (f"{stage} FX", "ours", "ratio"):
            table.add_column(column, justify="right")
    for row in rows:
        cells = [str(row["T"])]
        for stage in STAGES:
            theirs, ours = row["fx"][stage], row["ours"][stage]
            cells += [f"{theirs:.3f}", f"{ours:.3f}", f"{ours / theirs:.2f}"]
        table.add_row(*cells)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
