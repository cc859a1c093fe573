"""The tests as on other CPUs: ``python -m tests.cpus``, or with arguments of pytest; an hour for all of them.

Each run stands for a kind of CPU by environment variables: what torch's own kernels may use, what oneDNN may,
the instruction set of the kernel of recurrent modules, and the number of threads.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

RUNS: dict[str, dict[str, str]] = {
    "as it is, drawing other numbers": {"TORCHQ_SEED": "1"},
    "no vector instructions": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "TORCHQ_INSTRUCTION_SET": "sse2",
        "TORCHQ_SEED": "2",
    },
    "AVX2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "FBGEMM_ENABLE_INSTRUCTIONS": "AVX2",
        "TORCHQ_INSTRUCTION_SET": "avx2",
        "TORCHQ_SEED": "3",
    },
    "AVX2 and VNNI, four threads": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2_VNNI",
        "TORCHQ_INSTRUCTION_SET": "avx_vnni",
        "TORCHQ_THREADS": "4",
    },
    "AVX-512, four threads": {"ATEN_CPU_CAPABILITY": "avx512", "TORCHQ_THREADS": "4"},
}


def main(arguments: list[str]) -> int:
    options = arguments or ["-n", "2"]
    failed = []
    for name, variables in RUNS.items():
        print(f"== {name}: {shlex.join(f'{key}={value}' for key, value in variables.items())}", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", *options]
        if subprocess.run(command, env=os.environ | variables, check=False).returncode:
            failed.append(name)
    print(f"failed: {', '.join(failed) or 'none'}")
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
