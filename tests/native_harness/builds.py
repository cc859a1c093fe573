"""The cell loop compiled together with ``replay``: for several instruction sets, and under the sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchq_compat.recurrent.kernel.build import FLAGS, SOURCE

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
SHORT = Build(("-O0", "-g1", "-fsanitize=thread", STD_THREADS, "-DTORCHQ_COMPAT_PLAIN"))
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


def compile_replay(build: Build, into: Path, source: Path = SOURCE) -> Path:
    """Compile the program into the directory ``into``; return its path."""
    program = into / "replay"
    flags = [*COMMON, "-pthread", *build.flags]
    command = [build.compiler, *flags, f"-I{SOURCE.parent}", str(source), str(REPLAY), "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=1200)
    return program


def run_replay(
    build: Build, program: Path, calls: Path, threads: Sequence[int], *, seconds: int = 3600
) -> tuple[bytes, str]:
    """Return the results, and what was found wrong; sanitizers end the program at the first finding."""
    results = program.with_name("results")
    command = [*build.emulator, str(program), str(calls), str(results), *map(str, threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(max(threads)), "OMP_DYNAMIC": "false"}
    ended = subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=seconds, env=environment
    )
    problem = f"exit {ended.returncode}: {ended.stderr[:4000]}" if ended.returncode else ""
    return results.read_bytes() if not problem else b"", problem


def compile_integer_loops(build: Build, into: Path) -> Path:
    """Compile the loops over integers into the directory ``into``; return the program's path."""
    program = into / "integer_loops"
    command = [build.compiler, *COMMON, *build.flags, f"-I{SOURCE.parent}", *map(str, INTEGER_LOOPS)]
    subprocess.run([*command, "-o", str(program)], check=True, capture_output=True, text=True, timeout=1200)
    return program


def run_integer_loops(build: Build, program: Path, instruction_set: str | None = None) -> list[str]:
    """Return a hash of each result."""
    asked = {} if instruction_set is None else {"TORCHQ_COMPAT_INSTRUCTION_SET": instruction_set}
    command = [*build.emulator, str(program)]
    ran = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **asked})
    return ran.stdout.splitlines()
