"""dtypes: by name, by range, and torch.ao's quantized ones as the plain integers that PT2E graphs carry."""

from __future__ import annotations

import torch
from torch import Tensor
from torchao.quantization.pt2e.utils import to_underlying_dtype

from torchq_compat.errors import ConfigError

__all__ = [
    "FLOAT_DTYPES",
    "KERNEL_DTYPES",
    "LEGACY_DTYPES",
    "PACKED_DTYPES",
    "as_dtype",
    "dtype_name",
    "dtype_named",
    "dtype_range",
    "is_integer",
    "plain_dtype",
]

FLOAT_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64})
#: Several values in a byte. PT2E has one value per byte, in the range of the packed dtype.
PACKED_DTYPES = frozenset({torch.quint4x2, torch.quint2x4})
#: Integers that torch.ao's quantized tensors hold -> the dtype of such a tensor.
LEGACY_DTYPES = {torch.uint8: torch.quint8, torch.int8: torch.qint8, torch.int32: torch.qint32}
#: Those that integer kernels compute on.
KERNEL_DTYPES = (torch.uint8, torch.int8)


def dtype_name(dtype: torch.dtype) -> str:
    """Name ``dtype`` as messages, reports and files do: ``uint8``."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype of that name, the inverse of ``dtype_name``.

    Raises:
        ValueError: no dtype has it.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype of torch is called {name!r}")
    return dtype


def plain_dtype(dtype: torch.dtype) -> torch.dtype:
    """quint8 -> uint8, qint8 -> int8, qint32 -> int32; a float dtype stays what it is.

    Raises:
        ConfigError: no dtype that PT2E graphs carry.
    """
    if dtype in FLOAT_DTYPES:
        return dtype
    try:
        plain: torch.dtype = to_underlying_dtype(dtype)
    except AssertionError as cause:
        raise ConfigError(
            f"qconfig: the dtype {dtype} is not supported: PT2E graphs do not quantize to it.",
            hint="use quint8, qint8 or qint32 (or uint8, int8, int16, int32), or float16.",
        ) from cause
    return plain


def is_integer(dtype: torch.dtype) -> bool:
    """Return whether a tensor of this dtype is a quantized one."""
    return dtype not in FLOAT_DTYPES and dtype is not torch.bool


def dtype_range(dtype: torch.dtype) -> tuple[int, int]:
    """Smallest and largest value of an integer dtype, torch.ao's quantized ones included."""
    info = torch.iinfo(plain_dtype(dtype))
    return info.min, info.max


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x`` in ``dtype``. torch.export keeps a cast that changes nothing, and it would stand between a
    dequantize and the op that a backend looks for behind it."""
    return x if x.dtype == dtype else x.to(dtype)
