"""A line on the terminal for stages that take long."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["slow_stage"]

#: Seconds before the first line, and between two.
PATIENCE = 5.0


def _is_notebook() -> bool:
    """Whether the standard streams go to the cells of a notebook."""
    return type(sys.stderr).__module__.startswith("ipykernel.")


@contextmanager
def slow_stage(what: str) -> Iterator[None]:
    """Say ``what`` is under way where it takes long and somebody looks: at a terminal, or at a notebook."""
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
