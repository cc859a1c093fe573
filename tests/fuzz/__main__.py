"""Full runs of all fuzzers: ``python -m tests.fuzz [NAME ...] [--structures 1000]``."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import tempfile
import time
from collections.abc import Iterable

import torch

from tests.fuzz import bad_arguments, bad_calls, bad_settings, structures
from tests.fuzz.outcomes import Case, Outcome, Result, attempt, summary

FINE = (Outcome.OURS, Outcome.WARNED, Outcome.ACCEPTED)


def run(name: str, cases: Iterable[Case], seconds: float) -> bool:
    results: list[Result] = []
    started = time.monotonic()
    for case in cases:
        if time.monotonic() - started > seconds:
            print(f"{name}: time is up before {case.name}")
            break
        results.append(attempt(case))
        if results[-1].outcome not in FINE:
            print(results[-1], flush=True)
    print(f"{name}: {summary(results)}", flush=True)
    return all(result.outcome in FINE for result in results)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--structures", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no case after so long")
    args = parser.parse_args()
    torch.set_num_threads(1)
    fuzzers = {
        "arguments": bad_arguments.cases(),
        "settings": bad_settings.cases(),
        "calls": bad_calls.cases(),
        "structures": structures.cases(args.structures, args.seed),
    }
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        ran = [run(name, fuzzers[name], args.seconds) for name in args.names or fuzzers]
    return 0 if all(ran) else 1


if __name__ == "__main__":
    sys.exit(main())
