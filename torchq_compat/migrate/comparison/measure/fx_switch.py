"""Whether FX's own functions are meant, in a process where they are redirected to this package's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["calling_fx", "fx_is_called"]

_CALLED: ContextVar[bool] = ContextVar("torchq_compat_fx_is_called", default=False)


def fx_is_called() -> bool:
    return _CALLED.get()


@contextmanager
def calling_fx() -> Iterator[None]:
    """FX's functions are FX's inside the ``with`` block, those that user classes call too."""
    token = _CALLED.set(True)
    try:
        yield
    finally:
        _CALLED.reset(token)
