"""Suppress messages of torch and torchao during their import on which a user of this tool cannot act.

A CPU build of torch cannot load torchao's GPU libraries and logs each file; torchao still registers an
enumeration in a way that torch 2.13 deprecates; a CUDA build says that triton is missing; without NumPy,
which neither of them needs, torch warns once.
Only these messages are suppressed, and only during the imports: a script's own logs are not affected.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["import_noise_held_back"]

#: Logger -> a part of the message to suppress.
NOISE = {
    "torchao": "Failed to load ",
    "torch.utils._pytree": "Calling register_constant() on Enum subclasses is deprecated",
    "torch.utils.flop_counter": "triton not found",
}


@contextmanager
def import_noise_held_back() -> Iterator[None]:
    """Suppress the known messages inside the ``with`` block."""
    # This filter is kept: undoing it would also undo the filters that torchao installs meanwhile.
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
