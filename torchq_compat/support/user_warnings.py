"""Warnings that point at the user's line, at any depth of calls inside the package."""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path

from torchq_compat.errors import QuantizationNote, QuantizationWarning
from torchq_compat.support.codes import CODES

PACKAGE = str(Path(__file__).parents[1])
#: Frames of an import, which ``warnings`` does not count; frames of ``importlib.import_module`` are counted.
IMPORTING = "<frozen importlib"
NOT_THE_USERS = (PACKAGE, IMPORTING, str(importlib.__file__))


def warn_user(code: str, message: str) -> None:
    """Warn with the ``QuantizationWarning`` of ``code`` at the first caller outside this package."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(NOT_THE_USERS):
        level, frame = level + (not frame.f_code.co_filename.startswith(IMPORTING)), frame.f_back
    kind = QuantizationNote if CODES[code].severity == "note" else QuantizationWarning
    warnings.warn(kind(message, code=code), stacklevel=level)
