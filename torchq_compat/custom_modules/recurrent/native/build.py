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

from torchq_compat.user_warnings import warn_user

__all__ = ["KernelBuild", "build_kernel", "kernel_build"]

SOURCE = Path(__file__).with_name("cell_loop.cpp")
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
    """The kernel of this process; where there is none, a warning says so once."""
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
    """
    compiler = shlex.split(os.environ.get("CXX") or "c++")
    flags = [*FLAGS, *([WIDE_VECTORS] if torch.cpu.get_capabilities().get("avx512_f") else [])]
    try:
        path = _cache_directory() / f"cell_loop_{_key(compiler, flags)}.so"
        if not path.exists():
            _compile([*compiler, *flags, str(SOURCE)], path)
        return KernelBuild(ctypes.CDLL(str(path)))
    except subprocess.CalledProcessError as cause:
        return KernelBuild(None, f"{compiler[0]}: {_first_line(cause.stderr)}")
    except (OSError, subprocess.TimeoutExpired) as cause:
        return KernelBuild(None, str(cause))


def _compile(command: list[str], path: Path) -> None:
    """Into a file of its own first: another process may load or write ``path`` meanwhile."""
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        made = Path(directory) / path.name
        subprocess.run(
            [*command, "-o", str(made)],
            check=True,
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT_SECONDS,
        )
        made.replace(path)


def _cache_directory() -> Path:
    named = os.environ.get("TORCHQ_COMPAT_CACHE_DIR")
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    directory = Path(named) if named else Path(caches) / "torchq_compat"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _key(compiler: list[str], flags: list[str]) -> str:
    """Changes with the source, and with the CPU: a cache may be shared by machines."""
    parts = [SOURCE.read_bytes(), repr([compiler, flags]).encode(), _cpu()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _cpu() -> bytes:
    return repr(sorted(torch.cpu.get_capabilities().items())).encode()


def _first_line(text: str) -> str:
    return next((line for line in text.splitlines() if line.strip()), "it failed without a message")
