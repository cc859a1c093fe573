"""Shortens what torch prints about a failed capture: our error says it once, with the user's line."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

__all__ = ["failed_attempts_held_back", "partial_graphs_held_back", "without_frames_of_torch"]

LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
#: Logger -> the beginning of the messages that are held back.
OF_ATTEMPTS = {
    "torch._subclasses.fake_tensor": "failed while attempting to run meta for",
    "torch.fx.experimental.symbolic_shapes": "Unable to find user code corresponding to",
}


def without_frames_of_torch(cause: Exception) -> Exception:
    """Return ``cause`` without its own causes, and without the frames of torch and of this package.

    The frames of the user's model stay. torch.export has a hundred frames, and raises while it handles
    another error.
    """
    cause.__cause__ = cause.__context__ = None
    frames = []
    step = cause.__traceback__
    while step is not None:
        if not step.tb_frame.f_code.co_filename.startswith(LIBRARIES):
            frames.append(step)
        step = step.tb_next
    kept: TracebackType | None = None
    for frame in reversed(frames):
        kept = TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return cause.with_traceback(kept)


@contextmanager
def failed_attempts_held_back() -> Iterator[None]:
    """Suppress the messages in ``OF_ATTEMPTS``: a failed attempt is followed by one with fewer free sizes."""
    filters = {name: _without(beginning) for name, beginning in OF_ATTEMPTS.items()}
    for name, held_back in filters.items():
        logging.getLogger(name).addFilter(held_back)
    try:
        yield
    finally:
        for name, held_back in filters.items():
            logging.getLogger(name).removeFilter(held_back)


@contextmanager
def partial_graphs_held_back() -> Iterator[None]:
    """Suppress the graph up to the failed op, which torch.export prints on stderr, however long it is."""
    with redirect_stderr(_WithoutGraphs(sys.stderr)):
        yield


class _WithoutGraphs:
    """A stream without the code of graphs."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        is_graph = text.lstrip().startswith("def forward(self, ")
        return len(text) if is_graph else int(self.stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _without(beginning: str) -> logging.Filter:
    class WithoutAttempts(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            return not str(record.msg).startswith(beginning)

    return WithoutAttempts()
