"""Compile the kernel of recurrent modules for every architecture that a release carries it for.

To run: ``python .ci/kernel_libraries.py``.
Needs torch's headers, a g++ for this machine, and one for each other machine (``g++-aarch64-linux-gnu`` or
``g++-x86-64-linux-gnu``). The libraries go where ``build.py`` looks; ``--into dist`` makes the wheels too,
one for each machine; ``--machine x86_64`` does it for that one alone.
"""

from __future__ import annotations

import argparse
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch

from torchq_compat.recurrent.kernel.build import FLAGS, LIBRARIES, OPERATORS, SOURCE, TARGET, TARGETS, Target

ROOT = Path(__file__).parents[1]
INCLUDE = Path(torch.__file__).parent / "include"
#: libgomp and libstdc++ are those that torch ships or needs; libtorch_cpu is linked by name only.
#: A system with glibc 2.34 has the libstdc++ of GCC 11; later compilers take symbols of later ones.
OLDEST_GLIBC = 34
GLIBC = re.compile(rb"GLIBC_2\.(\d+)\0")
GLIBCXX = re.compile(rb"GLIBCXX_3\.4\.(\d+)\0")
#: The last version of libstdc++'s symbols -> the glibc of the first distribution that has it.
OF_LIBSTDCXX = {29: 34, 30: 35}


def platform_of(libraries: Iterable[Path], machine: str) -> str:
    """The platform tag of a wheel with ``libraries``, by the versions of symbols that they ask for."""
    texts = [path.read_bytes() for path in libraries]
    glibc = max(int(minor) for text in texts for minor in GLIBC.findall(text))
    libstdcxx = max(int(patch) for text in texts for patch in GLIBCXX.findall(text))
    by_libstdcxx = next((first for last, first in OF_LIBSTDCXX.items() if libstdcxx <= last), 39)
    return f"manylinux_2_{max(OLDEST_GLIBC, glibc, by_libstdcxx)}_{machine}"


def compiler_for(machine: str) -> str:
    """The g++ that compiles for ``machine``."""
    name = "g++" if machine == platform.machine() else f"{machine.replace('_', '-')}-linux-gnu-g++"
    if shutil.which(name) is None:
        raise SystemExit(f"{name} is needed for {machine} and is not installed")
    return name


def compile_for(target: Target) -> None:
    """The library of ``target``."""
    compiler = compiler_for(target.machine)
    target.path.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        stub = Path(directory) / "libtorch_cpu.so"
        named = ["-shared", "-nostdlib", "-Wl,-soname,libtorch_cpu.so", "-x", "c++", "/dev/null"]
        subprocess.run([compiler, *named, "-o", str(stub)], check=True)
        sources = [
            f"-I{INCLUDE}",
            str(SOURCE),
            *map(str, OPERATORS),
            f"-L{directory}",
            "-Wl,--no-as-needed",
            "-ltorch_cpu",
        ]
        command = [compiler, *FLAGS, *target.flags, TARGET, *sources, "-s", "-o", str(target.path)]
        subprocess.run(command, check=True)
    print(f"{target.path.name}: {target.path.stat().st_size >> 10} KiB", flush=True)


def wheel_for(machine: str, into: Path) -> None:
    """A wheel with the libraries of ``machine`` and no others."""
    away = [target.path for target in TARGETS if target.machine != machine and target.path.exists()]
    with tempfile.TemporaryDirectory() as directory:
        for path in away:
            shutil.move(path, Path(directory) / path.name)
        try:
            build = [sys.executable, "-m", "build", "--wheel", "--outdir", directory]
            # Files left by an earlier build would be packed as well.
            shutil.rmtree(ROOT / "build", ignore_errors=True)
            subprocess.run([*build, str(ROOT)], check=True)
        finally:
            for path in away:
                shutil.move(Path(directory) / path.name, path)
        (made,) = Path(directory).glob("*.whl")
        libraries = [target.path for target in TARGETS if target.machine == machine]
        tags = ["--platform-tag", platform_of(libraries, machine), "--remove"]
        subprocess.run([sys.executable, "-m", "wheel", "tags", *tags, str(made)], check=True)
        into.mkdir(parents=True, exist_ok=True)
        for wheel in Path(directory).glob("*.whl"):
            shutil.move(wheel, into / wheel.name)
            print(into / wheel.name, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, help="where the wheels go; without it none are made")
    machines = list(dict.fromkeys(target.machine for target in TARGETS))
    parser.add_argument("--machine", choices=machines, help="the only machine; default: all")
    options = parser.parse_args()
    machines = [options.machine] if options.machine else machines
    shutil.rmtree(LIBRARIES, ignore_errors=True)
    for target in TARGETS:
        if target.machine in machines:
            compile_for(target)
    if options.into is None:
        return
    try:
        for machine in machines:
            wheel_for(machine, options.into.resolve())
    finally:
        shutil.rmtree(LIBRARIES, ignore_errors=True)


if __name__ == "__main__":
    main()
