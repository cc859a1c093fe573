"""Compile and load the kernel of the opaque recurrent operator, for ExecuTorch's runtime of this process.

On a device, ``recurrent_kernel.cpp`` and ``cell_loop.cpp`` are linked into the program.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import torchq_compat.recurrent.kernel.op  # noqa: F401 - has the operator
from torchq_compat.errors import ExportError
from torchq_compat.lower.executorch.passes import executorch_module, runtime
from torchq_compat.recurrent.kernel.build import (
    FLAGS,
    HEADERS,
    SOURCE,
    TIME_LIMIT_SECONDS,
    cache_directory,
    fault_of,
    keep,
)
from torchq_compat.support.process_state import once

KERNEL = Path(__file__).with_name("recurrent_kernel.cpp")
#: The definitions that ExecuTorch was compiled with.
DEFINITIONS = ("-DC10_USING_CUSTOM_GENERATED_MACROS", "-DET_EVENT_TRACER_ENABLED")
NAME = "torchq_compat_native::recurrent.out"


@once
def load_recurrent_kernel() -> None:
    """Register the kernel with the runtime of this process, and its out variant for the exporter.

    Raises:
        ExportError: the kernel cannot be compiled here, or the extra is not installed.
    """
    root = Path(next(iter(executorch_module("exir").__path__))).parent
    registered = runtime().operator_registry
    if not hasattr(torch.ops.torchq_compat_native.recurrent, "out"):
        schema = str(torch.ops.torchq_compat_native.recurrent.default._schema)
        arguments = schema[schema.index("(") + 1 : schema.rindex(") ->")]
        torch.library.define(NAME, f"({arguments}, *, Tensor(a!)[] out) -> ()")
    if NAME in registered.operator_names:
        return
    try:
        ctypes.CDLL(str(_library(root)))
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as cause:
        said = str(getattr(cause, "stderr", None) or cause).strip()
        raise ExportError(
            f"ExecuTorch's kernel for recurrent modules could not be built: {said.partition(chr(10))[0]}",
            hint="install a C++ compiler with OpenMP, or name one in CXX; recurrent='rolled' needs none.",
            code="TQ932",
        ) from cause


def _library(root: Path) -> Path:
    """Return the kernel's library for the ExecuTorch at ``root``, compiled if it is not cached."""
    compiler = shlex.split(os.environ.get("CXX") or "") or ["c++"]
    includes = [root / "include", root / "include/executorch/runtime/core/portable_type/c10", SOURCE.parent]
    libraries = root / "lib"
    command = [
        *(*compiler, *FLAGS, *DEFINITIONS, *(f"-I{each}" for each in includes), str(KERNEL), str(SOURCE)),
        *(f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lexecutorch"),
    ]
    sources = [file.read_bytes() for file in (KERNEL, SOURCE, *HEADERS)]
    facts = [command, executorch_module("version").__version__, sorted(torch.cpu.get_capabilities().items())]
    key = hashlib.sha256(b"\0".join([*sources, repr(facts).encode()])).hexdigest()[:16]
    path = cache_directory() / f"executorch_{key}.so"
    if path.exists() and fault_of(path) is None:
        return path
    print(f"torchq_compat: compiling ExecuTorch's kernel of recurrent modules into {path}", file=sys.stderr)
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
    return path
