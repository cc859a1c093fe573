"""Time and peak memory of prepare, calibrate and convert: each flow in processes of its own, in turns."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tests.benchmarks.flows import FLOWS, LONG_SECONDS, STAGES

__all__ = ["measure_stages"]


def measure_stages(
    lengths: Sequence[int], *, rounds: int, repeats: int, limit: float, tell: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Return one row for each flow and sequence length: medians, or the limit in seconds that it exceeded.

    A flow that exceeds the limit, or takes long, is not run again at that length.
    """
    answers: dict[tuple[str, int], list[dict[str, Any] | None]] = {
        (flow, length): [] for length in lengths for flow in FLOWS
    }
    for round_ in range(rounds):
        for (flow, length), given in answers.items():
            if given and _is_long(given[-1]):
                continue
            tell(f"{flow}, T = {length}, process {round_ + 1} of {rounds}")
            given.append(_run_in_process(flow, length, repeats, limit))
    return [_row(flow, length, given, limit) for (flow, length), given in answers.items()]


def _run_in_process(flow: str, length: int, repeats: int, limit: float) -> dict[str, Any] | None:
    """Return the measurements that the process printed; None if it was ended at the limit."""
    command = [sys.executable, "-m", "tests.benchmarks.flows", flow, str(length), str(repeats)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=limit, check=True
        )
    except subprocess.TimeoutExpired:
        return None
    except subprocess.CalledProcessError as failure:
        raise RuntimeError(f"{flow} at T = {length} failed:\n{failure.stderr[-2000:]}") from failure
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def _is_long(answer: dict[str, Any] | None) -> bool:
    return answer is None or sum(answer["runs"][0][stage] for stage in STAGES) >= LONG_SECONDS


def _row(flow: str, length: int, answers: list[dict[str, Any] | None], limit: float) -> dict[str, Any]:
    row: dict[str, Any] = {"flow": flow, "length": length}
    kept = [answer for answer in answers if answer is not None]
    if not kept:
        return {**row, "limit_s": limit}
    runs = [run for answer in kept for run in answer["runs"]]
    return {
        **row,
        **{stage: statistics.median(run[stage] for run in runs) for stage in STAGES},
        "first_use": statistics.median(answer["first_use"] for answer in kept),
        "before_mib": statistics.median(answer["before_mib"] for answer in kept),
        "peak_mib": statistics.median(answer["peak_mib"] for answer in kept),
        "nodes": runs[0]["nodes"],
        "runs": len(runs),
    }
