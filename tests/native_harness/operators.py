"""Tests of the operators on a library with a sanitizer: ``python -m tests.native_harness.operators TESTS``.

``run_tests`` starts it with the sanitizer's runtime, in front of a Python and a torch without one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.native_harness.builds import STD_THREADS
from torchq_compat.recurrent.kernel import build

__all__ = ["CALLS", "FROM_THREADS", "SANITIZERS", "run_tests"]

#: Sanitizer -> its runtime and options. Python and torch keep what they allocate, and have no symbols for it.
SANITIZERS = {
    "address,undefined": ("libasan.so", "ASAN_OPTIONS", "detect_leaks=0:abort_on_error=1"),
    "thread": (
        "libtsan.so",
        "TSAN_OPTIONS",
        "halt_on_error=1:report_bugs=1:ignore_noninstrumented_modules=1",
    ),
}
#: The tests that call recurrent_operator.cpp, integer_operators.cpp, exact_convolution.cpp and ExecuTorch's
#: kernel with all kinds of arguments, wrong ones too.
CALLS = (
    "tests/recurrent/kernel/test_operator.py",
    "tests/recurrent/kernel/test_given_tensors.py",
    "tests/lower/integers/test_operators.py",
    "tests/lower/executorch/test_recurrent_kernel.py",
)
#: The tests that call two models from four threads.
FROM_THREADS = ("tests/quantize/test_threads.py::test_two_models_from_four_threads",)


def run_tests(sanitizer: str, tests: Sequence[str], into: Path, *, seconds: int = 3600) -> str:
    """Run ``tests`` with the library compiled by ``sanitizer`` into the directory ``into``; return what was
    found wrong."""
    runtime, name, options = SANITIZERS[sanitizer]
    paths = [_path(each) for each in (runtime, "libstdc++.so.6")]
    # The loader chooses among clones of a function before the runtime of ThreadSanitizer is ready for it.
    only = "-DTORCHQ_COMPAT_PLAIN" if sanitizer == "thread" else ""
    environment = {
        **os.environ,
        "CXX": f"g++ -g1 -fsanitize={sanitizer} -fno-sanitize-recover=all {STD_THREADS} {only}",
        "TORCHQ_COMPAT_CACHE_DIR": str(into / "cache"),
        "LD_PRELOAD": " ".join(paths),
        name: options,
    }
    command = [sys.executable, "-m", "tests.native_harness.operators", *tests]
    ran = subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=seconds, env=environment
    )
    compiled = list((into / "cache").glob("*.so"))
    if ran.returncode or not compiled:
        return f"exit {ran.returncode}: {ran.stdout[-2000:]}{ran.stderr[-4000:]}"
    return ""


def _path(library: str) -> str:
    asked = subprocess.run(["g++", f"-print-file-name={library}"], check=True, capture_output=True, text=True)
    return os.path.realpath(asked.stdout.strip())


if __name__ == "__main__":
    build.TIME_LIMIT_SECONDS = 3000
    build.FLAGS = tuple("-O1" if flag == "-O3" else flag for flag in build.FLAGS)
    sys.exit(pytest.main(["-q", "-n", "0", "-x", "-p", "no:cacheprovider", *sys.argv[1:]]))
