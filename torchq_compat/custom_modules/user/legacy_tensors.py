"""Integers with their qparams as torch.ao's quantized tensors, the form quantized classes of legacy scripts
take."""

from __future__ import annotations

from torch import Tensor

from torchq_compat.qspecs.qparams import PerTensorQParams, QParams, covering
from torchq_compat.support.dtypes import LEGACY_DTYPES
from torchq_compat.support.quantized_tensors import of_integers

__all__ = ["has_legacy_dtype", "legacy_tensor"]


def has_legacy_dtype(qparams: QParams) -> bool:
    """Return whether quantized tensors have a dtype for the integers of ``qparams``: quint8, qint8 or
    qint32."""
    return qparams.dtype in LEGACY_DTYPES


def legacy_tensor(q: Tensor, qparams: QParams) -> Tensor:
    """Return the quantized tensor with the integers ``q``.

    Results with several qparams (directions of a recurrent module) are quantized again with some that cover
    all: hardly a quantized operator takes per-channel activations.
    """
    if not isinstance(qparams, PerTensorQParams):
        whole = covering([piece for _, piece in qparams.runs])
        q, qparams = whole.quantize(qparams.dequantize(q)), whole
    return of_integers(q, qparams.scale, qparams.zero_point)
