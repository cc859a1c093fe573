"""Progress lines on the terminal for slow stages."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["slow_stage"]

#: Seconds before the first line, and between lines.
PATIENCE = 5.0


def _is_notebook() -> bool:
    """Return whether the standard streams go to the cells of a notebook."""
    return type(sys.stderr).__module__.startswith("ipykernel.")


@contextmanager
def slow_stage(what: str) -> Iterator[None]:
    """Print ``what`` and the elapsed time while a slow stage runs, in a terminal or a notebook only."""
    if not (sys.stderr.isatty() or _is_notebook()):
        yield
        return
    done, start = threading.Event(), time.monotonic()

    def tell() -> None:
        while not done.wait(PATIENCE):
            print(f"torchq_compat: {what}, {time.monotonic() - start:.0f} s", file=sys.stderr)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()
