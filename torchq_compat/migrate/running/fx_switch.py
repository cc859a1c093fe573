"""A switch that restores FX's own functions in a process that redirects them to this package's."""

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
    """Let FX's functions be FX's own inside the ``with`` block, also if user classes call them."""
    token = _CALLED.set(True)
    try:
        yield
    finally:
        _CALLED.reset(token)
