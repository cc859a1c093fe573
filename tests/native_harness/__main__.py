"""The long run: ``python -m tests.native_harness [--calls 300] [--seed 0]``. Exits with 1 on a fault."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tests.native_harness.builds import BUILDS, EMULATED, SANITIZED, compile_replay, run_replay
from tests.native_harness.calls import any_calls, calls_of_modules, write_calls
from tests.native_harness.operators import CALLS, FROM_THREADS, run_tests


def covered(features: Iterable[str]) -> list[str]:
    """Return lines on how many calls have each feature, and how many different sizes there are."""
    counts = Counter(features)
    sizes = {
        name: [each for each in counts if each.startswith(f"{name} ")] for name in ("hidden size", "batch")
    }
    counted = [f"{len(found)} different {name}s" for name, found in sizes.items()]
    others = sorted(set(counts).difference(*sizes.values()))
    return [*counted, *(f"{feature}: {counts[feature]}" for feature in others)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.native_harness")
    parser.add_argument("--calls", type=int, default=300, help="random programs")
    parser.add_argument("--seed", type=int, default=0, help="of the first of them")
    parser.add_argument("--threads", type=int, nargs="+", default=list(range(1, 9)))
    options = parser.parse_args()
    calls = [*calls_of_modules(), *any_calls(options.calls, options.seed)]
    faults, expected = 0, b""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "calls"
        write_calls(calls, path)
        print(f"{len(calls)} calls, {path.stat().st_size >> 20} MiB, threads {options.threads}", flush=True)
        print("; ".join(covered(feature for call in calls for feature in call.features)), flush=True)
        for name, build in {**BUILDS, **SANITIZED, **EMULATED}.items():
            if not build.is_possible():
                print(f"LEFT OUT {name}: {build.compiler} or its emulator is not installed", flush=True)
                continue
            began = time.monotonic()
            results, problem = run_replay(build, compile_replay(build), path, options.threads)
            expected = expected or results
            if not problem and results != expected:
                problem = "other bits than the first build"
            faults += bool(problem)
            print(
                f"{'FAULT' if problem else 'ok'} {name} ({time.monotonic() - began:.0f} s) {problem}",
                flush=True,
            )
        for name, tests in (("address,undefined", CALLS), ("thread", FROM_THREADS)):
            began = time.monotonic()
            problem = run_tests(name, tests, Path(directory) / name)
            faults += bool(problem)
            lasted = time.monotonic() - began
            print(f"{'FAULT' if problem else 'ok'} operators, {name} ({lasted:.0f} s) {problem}", flush=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
