"""Builds, caches and loads the compiled kernel; a release may carry it."""

import contextlib
import ctypes
import errno
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from torchq_compat.codes import CODES
from torchq_compat.support.process_state import once
from torchq_compat.support.user_warnings import warn_user

# Compiled libraries on disk: written whole or not at all, loaded only if whole and safe from other users.
#
# A truncated shared library kills the process that loads it. So a digest is appended to the library, which
# loaders ignore. Directory and file are opened once; what is checked and loaded is what was opened.


try:
    import fcntl
except ModuleNotFoundError:  # on Windows
    fcntl = None  # type: ignore[assignment]


MARK = b"\0torchq_compat sha256\0"
DIGEST_BYTES = hashlib.sha256().digest_size
#: The directories of builds that are under way, or were killed.
BUILDING = "build-"
# What takes half a minute on two idle cores took more than two on slow, busy ones; without the kernels a call
# takes up to a thousand times as long.
TIME_LIMIT_SECONDS = 600


class CacheError(Exception):
    """The cache directory cannot be used; the message says which it is and why."""


@dataclass(frozen=True)
class Cache:
    """The open cache directory, in which no other user may write."""

    path: Path
    descriptor: int

    def load(self, name: str, load: Callable[[str], object]) -> None:
        """Call ``load`` with a path of the library ``name``.

        Raises:
            FileNotFoundError: there is none.
            OSError: it must not be loaded, or does not load.
        """
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=self.descriptor)
        try:
            if (fault := fault_of(file)) is not None:
                raise OSError(fault)
            opened = Path(f"/proc/self/fd/{file}")
            load(str(opened if opened.exists() else self.path / name))
        except BaseException:
            os.close(file)
            raise
        # The loader remembers the library by this path: the file stays open, or another would get its number.

    def make(self, name: str, compile_to: Callable[[Path], None]) -> None:
        """Compile the library ``name`` in a directory of its own, append a digest, and move it here, where
        other processes may load or write it."""
        self._remove_killed_builds()
        with _problems_of(self.path):
            building = tempfile.TemporaryDirectory(dir=self.path, prefix=BUILDING)
        with building as directory:
            result = Path(directory) / name
            compile_to(result)
            content = result.read_bytes()
            with _problems_of(self.path), result.open("ab") as file:
                file.write(MARK + hashlib.sha256(content).digest())
                file.flush()
                os.fchmod(file.fileno(), 0o755)
                os.fsync(file.fileno())
                os.replace(result, name, dst_dir_fd=self.descriptor)
                os.fsync(self.descriptor)

    def _remove_killed_builds(self) -> None:
        for entry in os.scandir(self.path):
            with contextlib.suppress(OSError):
                is_old = time.time() - entry.stat(follow_symlinks=False).st_mtime > 5 * TIME_LIMIT_SECONDS
                if entry.name.startswith(BUILDING) and is_old:
                    shutil.rmtree(entry.path)


@contextlib.contextmanager
def _problems_of(directory: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as cause:  # RuntimeError: there is no home directory.
        raise CacheError(f"{directory}: {getattr(cause, 'strerror', None) or cause}") from cause


@contextlib.contextmanager
def open_cache() -> Iterator[Cache]:
    """Open ``TORCHQ_COMPAT_CACHE_DIR``, or ``torchq_compat`` in the user's cache directory, made if needed.

    Raises:
        CacheError: it cannot be created, or other users may write in it.
    """
    named = os.environ.get("TORCHQ_COMPAT_CACHE_DIR")
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    directory = Path(named or Path(caches) / "torchq_compat")
    with _problems_of(directory):
        directory = directory.expanduser().absolute()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if (fault := _fault_of_users(os.fstat(descriptor))) is not None:
            raise CacheError(f"{directory}: {fault}")
        yield Cache(directory, descriptor)
    finally:
        os.close(descriptor)


def load_or_make(name: str, compile_to: Callable[[Path], None], load: Callable[[str], object]) -> Path:
    """Load the library ``name`` of the cache and return its path; compile it if it is missing, and again,
    with a warning, if it must not be loaded.

    Raises:
        CacheError: see ``open_cache``; or nothing can be written there.
        OSError: what was compiled does not load; or from ``compile_to``, whose errors are raised.
    """
    with open_cache() as cache:
        path = cache.path / name
        try:
            cache.load(name, load)
            return path
        except FileNotFoundError:
            with one_at_a_time(cache.descriptor, TIME_LIMIT_SECONDS):
                if not path.exists():  # Another process may have compiled it in the meantime.
                    cache.make(name, compile_to)
        except OSError as fault:
            cache.make(name, compile_to)
            warn_user("TQ803", path=path, fault=fault)
        cache.load(name, load)
        return path


#: The open files that hold the lock of a directory.
_LOCKED: set[int] = set()


@contextlib.contextmanager
def one_at_a_time(directory: int, seconds: float) -> Iterator[None]:
    """Hold a lock on an open ``directory``; wait for another process that holds it, but no longer than
    ``seconds``.

    Without the lock, processes launched together would all compile the same kernel. The lock ends with the
    process that holds it. On a file system without locks nobody waits.
    """
    if fcntl is None:
        yield
        return
    held = os.open(".", os.O_RDONLY, dir_fd=directory)
    _LOCKED.add(held)
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
        _LOCKED.discard(held)
        os.close(held)


def _unlock_in_child() -> None:
    """Close what the child of a fork has of the parent's locks: it would hold them, and wait for itself."""
    while _LOCKED:
        os.close(_LOCKED.pop())


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_unlock_in_child)


def fault_of(file: int) -> str | None:
    """Return the reason why the library in the open ``file`` must not be loaded; None if it may be loaded."""
    if (fault := _fault_of_users(os.fstat(file))) is not None:
        return fault
    with open(file, "rb", closefd=False) as reading:
        stored = reading.read()
    end = -DIGEST_BYTES - len(MARK)
    content, mark, digest = stored[:end], stored[end:-DIGEST_BYTES], stored[-DIGEST_BYTES:]
    whole = mark == MARK and digest == hashlib.sha256(content).digest()
    return None if whole else "it is not whole"


def _fault_of_users(status: os.stat_result) -> str | None:
    if status.st_uid not in (os.geteuid(), 0):
        return "another user owns it"
    return "other users may write it" if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else None


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
    return next((target.path for target in TARGETS if target.runs_here() and target.path.exists()), None)


# Builds the native kernel once per machine, with the machine's C++ compiler, in a cache directory.
#
# One library has both the cell loop and the operator, which is written for torch's stable ABI.


SOURCE = Path(__file__).with_name("cell_loop.cpp")
HEADERS = tuple(sorted(SOURCE.parent.glob("*.h")))
OPERATORS = tuple(sorted({*SOURCE.parent.glob("*.cpp")} - {SOURCE}))
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


@dataclass(frozen=True)
class KernelBuild:
    """The result of building the kernel: the loaded library, or the problem that prevented it."""

    library: Path | None
    problem: str = ""
    code: str = "TQ801"

    @property
    def hint(self) -> str:
        """What helps if there is no kernel."""
        return CODES[self.code].hint

    @property
    def is_loaded(self) -> bool:
        """Whether a library is loaded, which then runs the operator."""
        return self.library is not None


@once
def kernel_build() -> KernelBuild:
    """Return the kernel of this process, built on the first call; warn once if it cannot be built."""
    build = build_kernel()
    if build.library is None:
        warn_user(build.code, problem=build.problem)
    return build


def build_kernel() -> KernelBuild:
    """Load the kernel that this release carries or an earlier process compiled, or compile it.

    A compiled kernel is kept in ``TORCHQ_COMPAT_CACHE_DIR``; default: ``torchq_compat`` in the user's cache
    directory. A kernel there that does not load is built again once, with a warning.
    """
    if (carried := carried_library()) is not None:
        try:
            _load_operators(str(carried))
            return KernelBuild(carried)
        except OSError as fault:
            warn_user("TQ802", library=carried, fault=fault)
    try:
        compiler = read_compiler()
        command = [*compiler, *FLAGS, TARGET]
        name = f"recurrent_{_key(compiler, [*FLAGS, TARGET])}.so"
        return KernelBuild(load_or_make(name, partial(_compile, command), _load_operators))
    except Exception as cause:
        return KernelBuild(None, *explain_failed_build(cause))


def read_compiler() -> list[str]:
    """Return the command of the C++ compiler.

    Raises:
        ValueError: the environment variable CXX cannot be read.
    """
    try:
        return shlex.split(os.environ.get("CXX") or "") or ["c++"]
    except ValueError as cause:
        raise ValueError(f"the environment variable CXX cannot be read: {cause}") from cause


def explain_failed_build(cause: Exception) -> tuple[str, str]:
    """Return what went wrong when a library was compiled or loaded, and its code."""
    said, full = getattr(cause, "stderr", None) or "", os.strerror(errno.ENOSPC)
    problem = str(cause)
    if isinstance(cause, subprocess.CalledProcessError):
        of_disk = "\n".join(line for line in said.splitlines() if full in line)
        lines = (line for line in (of_disk or said).splitlines() if line.strip())
        problem = f"{cause.cmd[0]}: {next(lines, 'it failed without a message')}"
    has_no_place = full in problem or isinstance(cause, CacheError)
    return problem, "TQ805" if has_no_place else "TQ801"


def _load_operators(path: str) -> None:
    """Load the library at ``path``, unless another library already has the operators.

    Raises:
        OSError: it does not load, or is another library.
    """
    if hasattr(torch.ops.torchq_compat_native, OF_LIBRARY):
        return  # A second library would replace the one in use.
    ctypes.CDLL(path)
    if not hasattr(torch.ops.torchq_compat_native, OF_LIBRARY):
        raise OSError("it does not have the operator of the kernel")


def _compile(compiler: list[str], path: Path) -> None:
    root = Path(torch.__file__).parent
    header = root / "include" / "torch" / "csrc" / "stable" / "library.h"
    if not header.exists():
        raise FileNotFoundError(f"torch {torch.__version__} was installed without {header}")
    print(
        f"torchq_compat: compiling the kernels of converted models, once, into {path.parents[1]}",
        file=sys.stderr,
    )
    objects = {source: path.with_name(f"{source.stem}.o") for source in (SOURCE, *OPERATORS)}
    commands = [
        [*compiler, f"-I{root / 'include'}", "-c", str(source), "-o", str(objects[source])]
        for source in objects
    ]
    with ThreadPoolExecutor(len(commands)) as both:
        list(both.map(run_compiler, commands))
    run_compiler(
        [*compiler, *map(str, objects.values()), f"-L{root / 'lib'}", "-ltorch_cpu", "-o", str(path)]
    )


def run_compiler(command: list[str]) -> None:
    """Run a compiler; raise what ``subprocess.run`` raises if it fails."""
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
