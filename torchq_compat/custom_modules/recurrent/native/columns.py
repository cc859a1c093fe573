"""The qparams of the columns of a cell's input, which the cell loop needs to read the input as integers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from torchq_compat.custom_modules.recurrent.native.program import qparams_row
from torchq_compat.opaque_calls.layouts import CallLayout
from torchq_compat.qspecs.qparams import PerChannelQParams, PerTensorQParams, QParams
from torchq_compat.support.dtypes import KERNEL_DTYPES

__all__ = ["ColumnQParams", "as_numbers", "column_qparams", "qparams_of_call"]

#: (number of columns, their qparams or None), from the first column to the last.
ColumnQParams = tuple[tuple[int, PerTensorQParams | None], ...]


def column_qparams(qparams: QParams | None, width: int, rank: int) -> ColumnQParams:
    """Return the column qparams of a tensor with ``qparams``, ``rank`` dimensions, the last of size
    ``width``."""
    if isinstance(qparams, PerChannelQParams):
        return qparams.runs if qparams.axis == rank - 1 else ((width, None),)
    return ((width, qparams),)


def qparams_of_call(layout: CallLayout) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the args and kwargs of a call with each tensor replaced by its qparams, or None."""
    none = (None,) * layout.inputs.count()
    pairs = zip(layout.input_qparams or none, layout.float_qparams or none, strict=True)
    all_qparams = (arriving or lying_on for arriving, lying_on in pairs)
    nested: tuple[tuple[Any, ...], dict[str, Any]] = layout.inputs.put_together(
        all_qparams, itertools.repeat(None)
    )
    return nested


def as_numbers(columns: Sequence[tuple[int, PerTensorQParams | None]]) -> list[float]:
    """Return ``columns`` as the numbers that the operator reads; if some have no 8-bit qparams, all are
    floats."""
    if any(qparams is None or qparams.dtype not in KERNEL_DTYPES for _, qparams in columns):
        columns = [(sum(width for width, _ in columns), None)]
    return [number for width, qparams in columns for number in (float(width), *qparams_row(qparams))]
