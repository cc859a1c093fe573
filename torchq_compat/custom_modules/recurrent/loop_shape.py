"""Shape of the loop over time in an exported program: the caller of export sets it, recurrent modules ask."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum

__all__ = ["LoopShape", "exporting_loops_as", "shape_in_export"]


class LoopShape(StrEnum):
    """Ways to write the loop over time."""

    ROLLED = "rolled"
    UNROLLED = "unrolled"
    OPAQUE = "opaque"


_SHAPE: ContextVar[LoopShape] = ContextVar("torchq_compat_loop_shape", default=LoopShape.ROLLED)


@contextmanager
def exporting_loops_as(shape: LoopShape) -> Iterator[None]:
    """Let ``shape_in_export`` return ``shape`` inside the ``with`` block."""
    token = _SHAPE.set(shape)
    try:
        yield
    finally:
        _SHAPE.reset(token)


def shape_in_export() -> LoopShape:
    """Return the shape that the running export asks for; rolled by default."""
    return _SHAPE.get()
