"""What torch and torchao log while they are imported, and no user of this tool can act on.

A CPU build of torch cannot load torchao's GPU libraries and says so file by file; torchao still registers an
enumeration in a way that torch 2.13 deprecates; without NumPy, which neither of them needs, torch warns once.
Only these messages are held back, and only while the imports run: whatever a script logs is its own.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["import_noise_held_back"]

#: Logger -> the beginning or a part of the message that is held back.
NOISE = {
    "torchao": "Failed to load ",
    "torch.utils._pytree": "Calling register_constant() on Enum subclasses is deprecated",
}


@contextmanager
def import_noise_held_back() -> Iterator[None]:
    """Hold the known messages back inside the ``with`` block."""
    # Not undone afterwards: that would also undo the filters torchao installs, this one among them.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    filters = {name: _without(part) for name, part in NOISE.items()}
    for name, noise_filter in filters.items():
        logging.getLogger(name).addFilter(noise_filter)
    try:
        yield
    finally:
        for name, noise_filter in filters.items():
            logging.getLogger(name).removeFilter(noise_filter)


def _without(part: str) -> logging.Filter:
    class WithoutNoise(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            return part not in record.getMessage()

    return WithoutNoise()
