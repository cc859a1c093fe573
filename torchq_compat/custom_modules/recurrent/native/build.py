"""Building the cell loop: once for a machine, with its C++ compiler, into a cache directory."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shlex
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from torchq_compat.custom_modules.recurrent.native.kernel_cache import cache_directory, fault_of, keep
from torchq_compat.support.user_warnings import warn_user

__all__ = ["KernelBuild", "build_kernel", "kernel_build"]

SOURCE = Path(__file__).with_name("cell_loop.cpp")
HEADER = SOURCE.with_name("threads.h")
# No contraction: a fused multiply-add would round otherwise than the q-dq graph.
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
    *("-fopenmp", "-shared", "-fPIC"),
)
WIDE_VECTORS = "-mprefer-vector-width=512"
TIME_LIMIT_SECONDS = 120


@dataclass(frozen=True)
class KernelBuild:
    """What came of building the kernel: a library, or the problem there was."""

    library: ctypes.CDLL | None
    problem: str = ""


@functools.cache
def kernel_build() -> KernelBuild:
    """Return the kernel of this process; where there is none, a warning says so once."""
    build = build_kernel()
    if build.library is None:
        warn_user(
            "recurrent modules run step by step on torch's operators, with the same numbers but slowly: the "
            f"native kernel could not be built ({build.problem}). Hint: install a C++ compiler with OpenMP, "
            "such as g++, or name one in the environment variable CXX."
        )
    return build


def build_kernel() -> KernelBuild:
    """Compile the kernel, or load what an earlier process compiled.

    It is kept under ``TORCHQ_COMPAT_CACHE_DIR``; default: ``torchq_compat`` in the user's cache directory.
    What is there and does not load is built again once, with a warning.
    """
    try:
        compiler = shlex.split(os.environ.get("CXX") or "") or ["c++"]
    except ValueError as cause:
        return KernelBuild(None, f"the environment variable CXX cannot be read: {cause}")
    try:
        return KernelBuild(_found_or_made(compiler))
    except subprocess.CalledProcessError as cause:
        return KernelBuild(None, f"{compiler[0]}: {_first_line(cause.stderr)}")
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as cause:
        return KernelBuild(None, str(cause))


def _found_or_made(compiler: list[str]) -> ctypes.CDLL:
    flags = [*FLAGS, *([WIDE_VECTORS] if torch.cpu.get_capabilities().get("avx512_f") else [])]
    path = cache_directory() / f"cell_loop_{_key(compiler, flags)}.so"
    command = [*compiler, *flags, str(SOURCE)]
    if path.exists():
        try:
            return _loaded(path)
        except OSError as fault:
            _compile(command, path)
            warn_user(f"the native kernel at {path} was built again: {fault}.")
    else:
        _compile(command, path)
    return _loaded(path)


def _loaded(path: Path) -> ctypes.CDLL:
    """Return the library at ``path``.

    Raises:
        OSError: it must not be loaded, or does not load.
    """
    fault = fault_of(path)
    if fault is not None:
        raise OSError(fault)
    library = ctypes.CDLL(str(path))
    if not hasattr(library, "torchq_compat_run_cell"):
        raise OSError("it has not the function of the kernel")
    return library


def _compile(command: list[str], path: Path) -> None:
    """Into a file of its own first: another process may load or write ``path`` meanwhile."""
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        made = Path(directory) / path.name
        subprocess.run(
            [*command, "-o", str(made)],
            check=True,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=TIME_LIMIT_SECONDS,
        )
        keep(made, path)


def _key(compiler: list[str], flags: list[str]) -> str:
    """Changes with the source, and with the CPU: a cache may be shared by machines."""
    parts = [SOURCE.read_bytes(), HEADER.read_bytes(), repr([compiler, flags]).encode(), _cpu()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _cpu() -> bytes:
    return repr(sorted(torch.cpu.get_capabilities().items())).encode()


def _first_line(text: str) -> str:
    return next((line for line in text.splitlines() if line.strip()), "it failed without a message")
