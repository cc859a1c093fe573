"""torch.ao's quantized dtypes -> the plain integer dtypes that PT2E graphs carry."""

from __future__ import annotations

import torch
from torch import Tensor
from torchao.quantization.pt2e.utils import to_underlying_dtype

from torchq_compat.errors import ConfigError

__all__ = ["FLOAT_DTYPES", "PACKED_DTYPES", "as_dtype", "dtype_range", "is_integer", "plain_dtype"]

FLOAT_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64})
#: Several values in a byte. PT2E has one value per byte, in the range of the packed dtype.
PACKED_DTYPES = frozenset({torch.quint4x2, torch.quint2x4})


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
    """Whether a tensor of this dtype is a quantized one."""
    return dtype not in FLOAT_DTYPES and dtype is not torch.bool


def dtype_range(dtype: torch.dtype) -> tuple[int, int]:
    """Smallest and largest value of an integer dtype, torch.ao's quantized ones included."""
    info = torch.iinfo(plain_dtype(dtype))
    return info.min, info.max


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in ``dtype``. torch.export keeps a cast that changes nothing, and it would stand between a
    dequantize and the op that a backend looks for behind it."""
    return x if x.dtype == dtype else x.to(dtype)
