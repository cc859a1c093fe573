"""Handle SIGTERM in the commands, so that no temporary file and no process is left."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["stopping_cleanly"]


@contextmanager
def stopping_cleanly() -> Iterator[None]:
    """Exit on SIGTERM inside the ``with`` block as on an interrupt: remove temporary files, then end.

    An existing handler, which is a script's own, is kept, and an ignored signal stays ignored.
    """

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
