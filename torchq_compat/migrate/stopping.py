"""What the commands do on SIGTERM: leave in order, so that no temporary file and no process is left."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["stopping_cleanly"]


@contextmanager
def stopping_cleanly() -> Iterator[None]:
    """On SIGTERM leave as on an interrupt: temporary files are removed, then the process ends.

    A handler that is there already is kept: it is a script's own, and a signal that is ignored stays so.
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
