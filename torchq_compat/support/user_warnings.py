"""Warnings that point at the user's line, however deep in the package they are raised."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

from torchq_compat.errors import QuantizationWarning

__all__ = ["warn_user"]

PACKAGE = str(Path(__file__).parents[1])


def warn_user(message: str) -> None:
    """Warn with a ``QuantizationWarning`` located at the first caller outside this package."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, QuantizationWarning, stacklevel=level)
