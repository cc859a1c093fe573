"""The shape of the loop over time in an exported program: export sets it, recurrent modules read it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum

import torch

__all__ = ["LoopShape", "exporting_loops_as", "packs_are_padded", "shape_in_export"]


class LoopShape(StrEnum):
    """Ways to write the loop over time."""

    ROLLED = "rolled"
    UNROLLED = "unrolled"
    OPAQUE = "opaque"
    #: LSTMs with dynamic qparams are opaque, other modules rolled; for translations of a program, not
    #: ``export``.
    OPAQUE_DYNAMIC_LSTM = "opaque dynamic lstm"
    #: Opaque, with the cells as text; for TorchScript, not ``export``.
    OPAQUE_TEXT = "opaque text"


_SHAPE: ContextVar[LoopShape | None] = ContextVar("torchq_compat_loop_shape", default=None)


@contextmanager
def exporting_loops_as(shape: LoopShape) -> Iterator[None]:
    """Let ``shape_in_export`` return ``shape`` inside the ``with`` block."""
    token = _SHAPE.set(shape)
    try:
        yield
    finally:
        _SHAPE.reset(token)


def shape_in_export() -> LoopShape:
    """Return the shape set for the running export; ``ROLLED`` if none is set."""
    # Dynamo cannot read a ContextVar. It runs in ``torch.export.export(strict=True)``, never in ``export``.
    if torch.compiler.is_dynamo_compiling():
        return LoopShape.ROLLED
    return _SHAPE.get() or LoopShape.ROLLED


def packs_are_padded() -> bool:
    """Return whether the running export is this package's, in which the rows of a PackedSequence are those of
    padded sequences."""
    return not torch.compiler.is_dynamo_compiling() and _SHAPE.get() is not None
