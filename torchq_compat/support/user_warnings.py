"""Warnings that point at the user's line, and those of libraries that are kept from the user."""

import contextlib
import importlib
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchq_compat.codes import CODES, said
from torchq_compat.errors import QuantizationNote, QuantizationWarning

PACKAGE = str(Path(__file__).parents[1])
#: Frames of an import, which ``warnings`` does not count; frames of ``importlib.import_module`` are counted.
IMPORTING = "<frozen importlib"
#: Called with each warning, whatever the filters say: ``torchq-compat run`` reports them.
LISTENERS: list[Callable[[QuantizationWarning], None]] = []
#: Frames of the package, of imports, and of contexts that decorate functions of the package.
NOT_THE_USERS = (PACKAGE, IMPORTING, str(importlib.__file__), str(contextlib.__file__))


def warn_user(code: str, /, **places: object) -> None:
    """Warn with the text and the hint of ``code`` at the first caller outside this package."""
    warn_of(code, said(code, **places))


def warn_of(code: str, what: str) -> None:
    """Warn of ``what``, with the hint of ``code``, as ``warn_user`` does."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(NOT_THE_USERS):
        level, frame = level + (not frame.f_code.co_filename.startswith(IMPORTING)), frame.f_back
    kind = QuantizationNote if CODES[code].severity == "note" else QuantizationWarning
    warning = kind(f"{what}\nHint: {CODES[code].hint}", code=code)
    for listener in LISTENERS:
        listener(warning)
    warnings.warn(warning, stacklevel=level)


@dataclass(eq=False)
class _TextInThread:
    """Stands in a filter of ``warnings`` for a regular expression, and matches in one thread."""

    is_meant: Callable[[str], bool]
    thread: int = field(default_factory=threading.get_ident)

    def match(self, text: str) -> bool:
        return threading.get_ident() == self.thread and self.is_meant(text)


@contextmanager
def silenced(
    is_meant: Callable[[str], bool] = lambda text: True, category: type[Warning] = Warning
) -> Iterator[None]:
    """Suppress, in this thread, warnings of ``category`` whose text ``is_meant``.

    ``warnings.catch_warnings`` is for all threads: it would hide what another thread warns of, and two that
    overlap leave the filters of one for good.
    """
    filters: Any = warnings.filters
    entry = ("ignore", _TextInThread(is_meant), category, None, 0)
    filters.insert(0, entry)
    try:
        yield
    finally:
        entry[1].thread = 0  # A copy of the filters may outlive this.
        with suppress(ValueError):
            filters.remove(entry)


@contextmanager
def logs_held_back(texts: Mapping[str, str]) -> Iterator[None]:
    """Suppress messages of the loggers in ``texts``, those that contain the logger's text."""

    def without(text: str) -> Callable[[logging.LogRecord], bool]:
        return lambda record: text not in record.getMessage()

    filters = {logging.getLogger(name): without(text) for name, text in texts.items()}
    for logger, held_back in filters.items():
        logger.addFilter(held_back)
    try:
        yield
    finally:
        for logger, held_back in filters.items():
            logger.removeFilter(held_back)


def is_of_treespec(text: str) -> bool:
    """Return whether ``text`` warns of the TreeSpecs of an exported graph, which torch itself copies."""
    return "LeafSpec" in text
