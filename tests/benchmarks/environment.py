"""What a measurement depends on, without identifying the machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import torch

__all__ = ["environment"]

PACKAGES = ("torch", "torchao", "executorch", "onnxruntime", "openvino", "nncf")
#: The CPU flags by which int8 and bfloat16 kernels are chosen.
FLAGS = ("avx2", "fma", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16", "asimd")


def environment(threads: int) -> dict[str, Any]:
    """Return versions, threads, cores and CPU flags."""
    return {
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "threads": threads,
        "cores": os.cpu_count(),
        "architecture": platform.machine(),
        "cpu_flags": [flag for flag in FLAGS if flag in _flags()],
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "quantized_engine": torch.backends.quantized.engine,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _flags() -> set[str]:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    flags = [line for line in lines if line.startswith(("flags", "Features"))]
    return set(flags[0].partition(":")[2].split()) if flags else set()
