"""Import the optional ExecuTorch packages when they are needed."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any

from torchq_compat.errors import ExecutorchError

__all__ = ["executorch_module", "runtime"]


def executorch_module(name: str) -> Any:
    """Return ``executorch.<name>``, with the quantized operators registered.

    Raises:
        ExecutorchError: the extra is not installed.
    """
    try:
        with warnings.catch_warnings():
            # The Python bindings warn that they are experimental.
            warnings.simplefilter("ignore")
            import_module("executorch.kernels.quantized")
            return import_module(f"executorch.{name}")
    except ImportError as cause:
        raise ExecutorchError(
            f"ExecuTorch cannot be imported: {cause}.",
            hint="install the extra: pip install torchq-compat[executorch].",
        ) from cause


def runtime() -> Any:
    """Return ExecuTorch's runtime in this process.

    Raises:
        ExecutorchError: the extra is not installed.
    """
    return executorch_module("runtime").Runtime.get()
