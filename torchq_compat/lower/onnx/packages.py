"""Import the optional ONNX packages when they are needed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torchq_compat.errors import OnnxError

__all__ = ["onnx_module"]


def onnx_module(name: str) -> Any:
    """Return the module ``name``, which needs the packages of the extra.

    Raises:
        OnnxError: the extra is not installed.
    """
    try:
        import_module("onnx")
        import_module("onnxscript")
        return import_module(name)
    except ImportError as cause:
        raise OnnxError(
            f"ONNX cannot be written: {cause}.",
            hint="install the extra: pip install torchq-compat[onnx].",
        ) from cause
