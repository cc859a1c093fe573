"""The cell loop compiled together with ``replay``: for several instruction sets, and under the sanitizers."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchq_compat.recurrent.kernel.build import FLAGS, HEADERS, SOURCE, load_or_make

__all__ = [
    "BUILDS",
    "EMULATED",
    "SANITIZED",
    "SHORT",
    "Build",
    "compile_integer_loops",
    "compile_replay",
    "run_integer_loops",
    "run_replay",
]

REPLAY = Path(__file__).with_name("replay.cpp")
INTEGER_LOOPS = (Path(__file__).with_name("integer_loops.cpp"), SOURCE.with_name("exact_convolution.cpp"))
#: The flags of a library, without those for sharing.
COMMON = [flag for flag in FLAGS if flag not in ("-shared", "-fPIC")]
STD_THREADS = "-DTORCHQ_COMPAT_STD_THREADS"
DEBUG = ("-g", "-O1", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all")


@dataclass(frozen=True)
class Build:
    """One way to build; ``emulator`` is the command that runs the program on this machine."""

    flags: tuple[str, ...]
    compiler: str = "g++"
    emulator: tuple[str, ...] = ()

    def is_possible(self) -> bool:
        return all(shutil.which(each) for each in (self.compiler, *self.emulator[:1]))


#: A build that compiles in seconds and finds races, in the kernels of plain C++.
SHORT = Build(("-O1", "-g1", "-fsanitize=thread", STD_THREADS, "-DTORCHQ_COMPAT_PLAIN"))
#: Each build has the kernels of every instruction set, and runs those that its machine supports.
BUILDS = {
    "a library's": Build(()),
    "threads of the standard library": Build((STD_THREADS,)),
    "for this machine alone": Build(("-march=native",)),
    "plain C++": Build((STD_THREADS, "-DTORCHQ_COMPAT_PLAIN")),
}
SANITIZED = {
    "address and undefined": Build((*DEBUG, "-fsanitize=address,undefined", STD_THREADS)),
    "threads": Build((*DEBUG, "-fsanitize=thread", STD_THREADS)),
}
EMULATED = {
    "aarch64": Build(("-static", STD_THREADS), "aarch64-linux-gnu-g++", ("qemu-aarch64", "-cpu", "max")),
    "aarch64 without dot products": Build(
        ("-static", STD_THREADS), "aarch64-linux-gnu-g++", ("qemu-aarch64", "-cpu", "cortex-a53")
    ),
}


def compile_replay(build: Build, source: Path = SOURCE) -> Path:
    """Compile the program, see ``_compiled``; return its path."""
    return _compiled("replay", build, ["-pthread"], source, REPLAY)


def _compiled(name: str, build: Build, flags: list[str], *sources: Path) -> Path:
    """Return the program of ``sources``; it is kept beside the kernel, because compiling takes seconds."""
    command = [build.compiler, *COMMON, *flags, *build.flags]
    version = subprocess.run([build.compiler, "--version"], check=True, capture_output=True).stdout
    read = [version, repr(command).encode(), *(path.read_bytes() for path in (*sources, *HEADERS))]
    key = hashlib.sha256(b"\0".join(read)).hexdigest()[:16]

    def compile_to(program: Path) -> None:
        whole = [*command, f"-I{SOURCE.parent}", *map(str, sources), "-o", str(program)]
        subprocess.run(whole, check=True, capture_output=True, text=True, timeout=1200)

    return load_or_make(f"{name}_{key}", compile_to, lambda _: None)


def run_replay(
    build: Build, program: Path, calls: Path, threads: Sequence[int], *, seconds: int = 3600
) -> tuple[bytes, str]:
    """Return the results, and what was found wrong; sanitizers end the program at the first finding."""
    results = calls.with_name("results")
    command = [*build.emulator, str(program), str(calls), str(results), *map(str, threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(max(threads)), "OMP_DYNAMIC": "false"}
    ended = subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=seconds, env=environment
    )
    problem = f"exit {ended.returncode}: {ended.stderr[:4000]}" if ended.returncode else ""
    return results.read_bytes() if not problem else b"", problem


def compile_integer_loops(build: Build) -> Path:
    """Compile the loops over integers, see ``_compiled``; return the program's path."""
    return _compiled("integer_loops", build, [], *INTEGER_LOOPS)


def run_integer_loops(build: Build, program: Path, instruction_set: str | None = None) -> list[str]:
    """Return a hash of each result."""
    asked = {} if instruction_set is None else {"TORCHQ_COMPAT_INSTRUCTION_SET": instruction_set}
    command = [*build.emulator, str(program)]
    ran = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **asked})
    return ran.stdout.splitlines()
