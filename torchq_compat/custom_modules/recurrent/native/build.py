"""Builds the native kernel once per machine, with the machine's C++ compiler, in a cache directory.

One library has both the cell loop and the operator, which is written for torch's stable ABI.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from torchq_compat.custom_modules.recurrent.native.carried import carried_library
from torchq_compat.custom_modules.recurrent.native.kernel_cache import (
    cache_directory,
    fault_of,
    keep,
    one_at_a_time,
)
from torchq_compat.support.user_warnings import warn_user

__all__ = ["OF_LIBRARY", "KernelBuild", "build_kernel", "kernel_build"]

SOURCE = Path(__file__).with_name("cell_loop.cpp")
HEADERS = tuple(
    SOURCE.with_name(f"{name}.h")
    for name in (
        *("cell_loop", "cell_program", "cell_kernels", "instruction_sets", "tile_kernels", "threads"),
        *("integer_kernels", "stable_tensors"),
    )
)
OPERATORS = tuple(SOURCE.with_name(f"{name}.cpp") for name in ("recurrent_operator", "integer_operators"))
# No contraction: a fused multiply-add would round differently from the q-dq graph. The instruction set is
# chosen at run time, by the CPU.
FLAGS = (
    *("-std=c++20", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
    *("-fopenmp", "-shared", "-fPIC"),
)
#: The oldest torch the library supports: 2.13. Later versions keep the part of the stable ABI that it uses.
TARGET = "-DTORCH_TARGET_VERSION=0x020d000000000000"
#: An operator that only the library has; the others are defined in Python before it is loaded.
OF_LIBRARY = "kept_weights"
TIME_LIMIT_SECONDS = 120
LOCK = threading.RLock()


@dataclass(frozen=True)
class KernelBuild:
    """The result of building the kernel: the loaded library, or the problem that prevented it."""

    library: Path | None
    problem: str = ""

    @property
    def is_loaded(self) -> bool:
        """Whether a library is loaded, which then runs the operator."""
        return self.library is not None


@functools.cache
def kernel_build() -> KernelBuild:
    """Return the kernel of this process, built on the first call; warn once if it cannot be built."""
    with LOCK:
        build = build_kernel()
    if build.library is None:
        warn_user(
            "converted models run on torch's operators, recurrent modules step by step, with equal numbers "
            f"but slowly: the native kernel could not be built ({build.problem}). Hint: install a C++ "
            "compiler with OpenMP, such as g++, or name one in the environment variable CXX."
        )
    return build


def build_kernel() -> KernelBuild:
    """Load the kernel that this release carries or an earlier process compiled, or compile it.

    A compiled kernel is kept in ``TORCHQ_COMPAT_CACHE_DIR``; default: ``torchq_compat`` in the user's cache
    directory. A kernel there that does not load is built again once, with a warning.
    """
    carried = carried_library()
    if carried is not None:
        try:
            return KernelBuild(_with_operator(carried))
        except OSError as fault:
            warn_user(f"the library {carried} does not load, one is compiled instead: {fault}.")
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


def _found_or_made(compiler: list[str]) -> Path:
    flags = [*FLAGS, TARGET]
    path = cache_directory() / f"recurrent_{_key(compiler, flags)}.so"
    if not path.exists():
        with one_at_a_time(path.parent, TIME_LIMIT_SECONDS):
            if not path.exists():  # Another process may have compiled it in the meantime.
                _compile([*compiler, *flags], path)
    try:
        return _loaded(path)
    except OSError as fault:
        _compile([*compiler, *flags], path)
        warn_user(f"the native kernel at {path} was built again: {fault}.")
    return _loaded(path)


def _torch_root() -> Path:
    """Return the directory of torch's headers and libraries.

    Raises:
        OSError: if the headers of the stable ABI are missing.
    """
    root = Path(torch.__file__).parent
    header = root / "include" / "torch" / "csrc" / "stable" / "library.h"
    if not header.exists():
        raise FileNotFoundError(f"torch {torch.__version__} was installed without {header}")
    return root


def _loaded(path: Path) -> Path:
    """Load the library at ``path``, after checking it, and return ``path``.

    Raises:
        OSError: if it must not be loaded, or does not load.
    """
    fault = fault_of(path)
    if fault is not None:
        raise OSError(fault)
    return _with_operator(path)


def _with_operator(path: Path) -> Path:
    """Load the library at ``path``, unless another library already has the operator, and return ``path``.

    Raises:
        OSError: if it does not load.
    """
    if hasattr(torch.ops.torchq_compat_native, OF_LIBRARY):
        return path  # A second library would replace the one in use.
    torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    if not hasattr(torch.ops.torchq_compat_native, OF_LIBRARY):
        raise OSError("it does not have the operator of the kernel")
    return path


def _compile(compiler: list[str], path: Path) -> None:
    """Compile in a temporary directory, then move to ``path``, which other processes may load or write."""
    root = _torch_root()
    print(f"torchq_compat: compiling the kernels of converted models, once, into {path}", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        made = Path(directory) / path.name
        objects = {source: made.with_name(f"{source.stem}.o") for source in (SOURCE, *OPERATORS)}
        commands = [
            [*compiler, f"-I{root / 'include'}", "-c", str(source), "-o", str(objects[source])]
            for source in objects
        ]
        with ThreadPoolExecutor(len(commands)) as both:
            list(both.map(_run, commands))
        _run([*compiler, *map(str, objects.values()), f"-L{root / 'lib'}", "-ltorch_cpu", "-o", str(made)])
        keep(made, path)


def _run(command: list[str]) -> None:
    subprocess.run(
        command,
        check=True,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=TIME_LIMIT_SECONDS,
    )


def _key(compiler: list[str], flags: list[str]) -> str:
    """Return a key of the sources, compiler, flags, torch and architecture: machines may share a cache."""
    files = [file.read_bytes() for file in (SOURCE, *HEADERS, *OPERATORS)]
    parts = [*files, repr([compiler, flags, torch.__version__, platform.machine()]).encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _first_line(text: str) -> str:
    return next((line for line in text.splitlines() if line.strip()), "it failed without a message")
