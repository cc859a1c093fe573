"""The long run: ``python -m tests.native_harness [--calls 300] [--seed 0]``. Exit 1: a fault was found."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.native_harness.builds import BUILDS, EMULATED, SANITIZED, compile_replay, run_replay
from tests.native_harness.calls import calls_of_modules, random_call, write_calls


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.native_harness")
    parser.add_argument("--calls", type=int, default=300, help="random programs")
    parser.add_argument("--seed", type=int, default=0, help="of the first of them")
    parser.add_argument("--threads", type=int, nargs="+", default=list(range(1, 9)))
    options = parser.parse_args()
    calls = [*calls_of_modules(), *(random_call(options.seed + i) for i in range(options.calls))]
    faults, expected = 0, b""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "calls"
        write_calls(calls, path)
        print(f"{len(calls)} calls, {path.stat().st_size >> 20} MiB, threads {options.threads}", flush=True)
        for name, build in {**BUILDS, **SANITIZED, **EMULATED}.items():
            if not build.is_possible():
                print(f"LEFT OUT {name}: {build.compiler} or its emulator is not installed", flush=True)
                continue
            began = time.monotonic()
            results, problem = run_replay(
                build, compile_replay(build, Path(directory)), path, options.threads
            )
            expected = expected or results
            if not problem and results != expected:
                problem = "other bits than the first build"
            faults += bool(problem)
            print(
                f"{'FAULT' if problem else 'ok'} {name} ({time.monotonic() - began:.0f} s) {problem}",
                flush=True,
            )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
