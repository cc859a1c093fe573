"""Builds, caches and loads the compiled kernel; a release may carry it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shlex
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from torchq_compat.support.process_state import once
from torchq_compat.support.user_warnings import warn_user

# The compiled kernel on disk: written whole or not at all, loaded only if whole and safe from other users.
#
# A truncated shared library kills the process that loads it. So a digest is appended to the library, which
# loaders ignore.


try:
    import fcntl
except ModuleNotFoundError:  # on Windows
    fcntl = None  # type: ignore[assignment]


MARK = b"\0torchq_compat sha256\0"
DIGEST_BYTES = hashlib.sha256().digest_size


def cache_directory() -> Path:
    """Return ``TORCHQ_COMPAT_CACHE_DIR``, or ``torchq_compat`` in the user's cache directory; create it if it
    is missing.

    Raises:
        OSError: if it cannot be created, or other users may replace files in it.
        RuntimeError: if there is no home directory.
    """
    named = os.environ.get("TORCHQ_COMPAT_CACHE_DIR")
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    directory = Path(named or Path(caches) / "torchq_compat").expanduser().absolute()
    directory.mkdir(parents=True, exist_ok=True)
    mode = directory.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise PermissionError(f"everybody may replace files in the cache directory {directory}")
    return directory


def keep(made: Path, path: Path) -> None:
    """Append a digest to the library ``made`` and move it to ``path``, in the same file system."""
    content = made.read_bytes()
    with made.open("ab") as file:
        file.write(MARK + hashlib.sha256(content).digest())
        file.flush()
        os.fchmod(file.fileno(), 0o755)
        os.fsync(file.fileno())
    made.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


@contextlib.contextmanager
def one_at_a_time(directory: Path, seconds: float) -> Iterator[None]:
    """Hold a lock on ``directory``; wait for another process that holds it, but no longer than ``seconds``.

    Without the lock, processes launched together would all compile the same kernel. The lock ends with the
    process that holds it. On a file system without locks nobody waits.
    """
    if fcntl is None:
        yield
        return
    held = os.open(directory, os.O_RDONLY)
    try:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:
                break
            else:
                break
        yield
    finally:
        os.close(held)


def fault_of(path: Path) -> str | None:
    """Return the reason why the library at ``path`` must not be loaded; None if it may be loaded."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid():
            return "another user owns it"
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return "other users may write it"
        stored = file.read()
    content, mark, digest = stored[: -DIGEST_BYTES - len(MARK)], *_end(stored)
    whole = mark == MARK and digest == hashlib.sha256(content).digest()
    return None if whole else "it is not whole"


def _end(stored: bytes) -> tuple[bytes, bytes]:
    return stored[-DIGEST_BYTES - len(MARK) : -DIGEST_BYTES], stored[-DIGEST_BYTES:]


# The kernel libraries that a release carries, one for each architecture, cross-compiled.
#
# A wheel for Linux has them in ``libraries``. A source distribution has none: the kernel is compiled on the
# user's machine on first use.


LIBRARIES = Path(__file__).with_name("libraries")


@dataclass(frozen=True)
class Target:
    """An architecture that a library is compiled for; the instruction set is chosen at run time.

    Attributes:
        machine: the name of the architecture in ``platform.machine``.
        flags: flags for the compiler.
    """

    machine: str
    flags: tuple[str, ...]

    @property
    def path(self) -> Path:
        return LIBRARIES / f"recurrent_{self.machine}.so"

    def runs_here(self) -> bool:
        return platform.machine() == self.machine


TARGETS = (Target("x86_64", ("-march=x86-64",)), Target("aarch64", ("-march=armv8-a",)))


def carried_library() -> Path | None:
    """Return the path of the carried library for this machine; None if the release carries none."""
    return next((each.path for each in TARGETS if each.runs_here() and each.path.exists()), None)


# Builds the native kernel once per machine, with the machine's C++ compiler, in a cache directory.
#
# One library has both the cell loop and the operator, which is written for torch's stable ABI.


SOURCE = Path(__file__).with_name("cell_loop.cpp")
HEADERS = tuple(
    SOURCE.with_name(f"{name}.h")
    for name in (
        *("cell_loop", "cell_program", "cell_kernels", "instruction_sets", "tile_kernels", "threads"),
        *("integer_kernels", "stable_tensors", "targets", "exact_convolution", "exact_convolution_kernels"),
    )
)
OPERATORS = tuple(
    SOURCE.with_name(f"{name}.cpp")
    for name in ("recurrent_operator", "integer_operators", "exact_convolution")
)
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


@dataclass(frozen=True)
class KernelBuild:
    """The result of building the kernel: the loaded library, or the problem that prevented it."""

    library: Path | None
    problem: str = ""

    @property
    def is_loaded(self) -> bool:
        """Whether a library is loaded, which then runs the operator."""
        return self.library is not None


@once
def kernel_build() -> KernelBuild:
    """Return the kernel of this process, built on the first call; warn once if it cannot be built."""
    build = build_kernel()
    if build.library is None:
        warn_user(
            "TQ801",
            "converted models run on torch's operators, recurrent modules step by step, with equal numbers "
            f"but slowly: the native kernel could not be built ({build.problem}). Hint: install a C++ "
            "compiler with OpenMP, such as g++, or name one in the environment variable CXX.",
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
            warn_user("TQ802", f"the library {carried} does not load, one is compiled instead: {fault}.")
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
        warn_user("TQ803", f"the native kernel at {path} was built again: {fault}.")
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
