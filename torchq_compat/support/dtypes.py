"""dtypes: names, ranges, and the plain integer dtypes of PT2E graphs for torch.ao's quantized dtypes."""

import torch
from torch import Tensor
from torchao.quantization.pt2e.utils import to_underlying_dtype

from torchq_compat.errors import ConfigError

FLOAT_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64})
#: dtypes with several values in a byte. PT2E stores one value per byte, in the range of the packed dtype.
PACKED_DTYPES = frozenset({torch.quint4x2, torch.quint2x4})
#: Integer dtype -> the dtype of torch.ao's quantized tensors that hold such integers.
LEGACY_DTYPES = {torch.uint8: torch.quint8, torch.int8: torch.qint8, torch.int32: torch.qint32}
#: dtypes that torch.ao's quantized tensors do not have: there is no range of FX's.
SIXTEEN_BITS = (torch.int16, torch.uint16)
#: The dtypes that integer kernels compute on.
KERNEL_DTYPES = (torch.uint8, torch.int8)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of ``dtype`` for messages, reports and files: ``uint8``."""
    return str(dtype).removeprefix("torch.")


def plain_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the plain dtype of ``dtype``: quint8 -> uint8, qint8 -> int8, qint32 -> int32; floats unchanged.

    Raises:
        ConfigError: PT2E graphs do not quantize to ``dtype``.
    """
    if dtype in FLOAT_DTYPES:
        return dtype
    try:
        plain: torch.dtype = to_underlying_dtype(dtype)
    except AssertionError as cause:
        raise ConfigError.of("TQ910.dtype", dtype=dtype) from cause
    return plain


def is_integer(dtype: torch.dtype) -> bool:
    """Return whether tensors of ``dtype`` are quantized: it is neither a float dtype nor bool."""
    return dtype not in FLOAT_DTYPES and dtype is not torch.bool


def dtype_range(dtype: torch.dtype) -> tuple[int, int]:
    """Return the smallest and largest value of an integer dtype, or of a quantized dtype of torch.ao."""
    info = torch.iinfo(plain_dtype(dtype))
    return info.min, info.max


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x`` in ``dtype``, without a cast if it has it: torch.export would keep that cast between a
    dequantize and the op after it, where a backend looks for the op."""
    return x if x.dtype == dtype else x.to(dtype)
