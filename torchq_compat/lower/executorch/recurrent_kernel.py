"""Compile and load the kernel of the opaque recurrent operator, for ExecuTorch's runtime of this process.

On a device, ``recurrent_kernel.cpp`` and ``cell_loop.cpp`` are linked into the program.
"""

import ctypes
import hashlib
import sys
from pathlib import Path

import torch

import torchq_compat.recurrent.kernel.op  # noqa: F401 - has the operator
from torchq_compat.codes import CODES
from torchq_compat.errors import ExportError
from torchq_compat.lower.executorch.passes import executorch_module, runtime
from torchq_compat.recurrent.kernel import build
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
        _load_or_make(root)
    except Exception as cause:
        problem, code = build.explain_failed_build(cause)
        raise ExportError.of("TQ930.executorch_kernel", problem=problem, advice=CODES[code].hint) from cause


def _load_or_make(root: Path) -> None:
    """Load the kernel's library for the ExecuTorch at ``root``, compiled if it is not cached."""
    libraries = root / "lib"
    includes = root / "include", root / "include/executorch/runtime/core/portable_type/c10"
    command = [
        *build.read_compiler(),
        *build.FLAGS,
        *DEFINITIONS,
        *(f"-I{include}" for include in includes),
        *(f"-L{libraries}", f"-Wl,-rpath,{libraries}"),
    ]
    # Clones share a library: the key has what the sources say, and not where they are.
    sources = [file.read_bytes() for file in (KERNEL, build.SOURCE, *build.HEADERS)]
    facts = [command, executorch_module("version").__version__, sorted(torch.cpu.get_capabilities().items())]
    key = hashlib.sha256(b"\0".join([*sources, repr(facts).encode()])).hexdigest()[:16]

    def compile_to(path: Path) -> None:
        print(
            f"torchq_compat: compiling ExecuTorch's recurrent kernel into {path.parents[1]}", file=sys.stderr
        )
        compiled = f"-I{build.SOURCE.parent}", str(KERNEL), str(build.SOURCE), "-lexecutorch"
        build.run_compiler([*command, *compiled, "-o", str(path)])

    build.load_or_make(f"executorch_{key}.so", compile_to, ctypes.CDLL)
