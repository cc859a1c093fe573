"""Run the cases one after another, each guarded, and print what each one measured."""

from __future__ import annotations

import faulthandler
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch

SECONDS_OF_A_CASE, SECONDS = 45, 330
CASES: dict[str, Callable[[torch.device], str]] = {}


class OutOfTime(BaseException):
    """No ``except Exception`` of the library takes it for an error of the model."""


def case(name: str) -> Callable[[Callable[[torch.device], str]], Callable[[torch.device], str]]:
    """Register a function that asserts what must be true and returns what it measured."""

    def register(function: Callable[[torch.device], str]) -> Callable[[torch.device], str]:
        CASES[name] = function
        return function

    return register


def run(name: str, device: torch.device) -> tuple[bool, str]:
    """Run one case and print its row; the end of the traceback follows one that fails."""
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    signal.alarm(SECONDS_OF_A_CASE)
    trace = ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = CASES[name](device)
            if is_cuda:
                torch.cuda.synchronize()
    except BaseException as error:
        result = f"{type(error).__name__}: {str(error).strip()[:600]}"
        trace = "".join(traceback.format_exc().splitlines(keepends=True)[-14:])
    finally:
        signal.alarm(0)
    peak = f"{torch.cuda.max_memory_allocated() / 2**20:6.0f} MiB" if is_cuda else ""
    verdict = "FAIL" if trace else "ok  "
    print(f"{verdict} {time.perf_counter() - start:6.1f} s {peak} {name}: {result}", flush=True)
    if trace:
        print("    | " + trace.strip().replace("\n", "\n    | "), flush=True)
    return not trace, result


def _out_of_time(*_: Any) -> None:
    raise OutOfTime(f"more than {SECONDS_OF_A_CASE} s")


def main() -> None:
    """Run all cases, or those with a word in their names, and exit with 1 if one fails."""
    from tests.cuda import devices, many, uses  # noqa: F401 - they register their cases

    given = sys.argv[1:]
    device = torch.device(given[0] if given else "cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        print(torch.cuda.get_device_name(device), "CUDA", torch.version.cuda)
        # As exact as on the CPU: a value then falls into another step only where two are as near.
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    print("torch", torch.__version__, "on", device, flush=True)
    faulthandler.enable()
    signal.signal(signal.SIGALRM, _out_of_time)
    names = [name for name in CASES if len(given) < 2 or given[1] in name]
    start = time.monotonic()
    failed = [n for n in names if time.monotonic() - start > SECONDS or not run(n, device)[0]]
    print(f"{len(names) - len(failed)} of {len(names)} cases hold", *(f"\n  not: {name}" for name in failed))
    sys.exit(bool(failed))
