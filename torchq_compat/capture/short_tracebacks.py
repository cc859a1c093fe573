"""Causes whose traceback is torch's own: our error says what they say, and the user's line."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import torch

__all__ = ["without_frames_of_torch"]

LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def without_frames_of_torch(cause: Exception) -> Exception:
    """Cut what ``cause`` would print above our error: causes of its own, and frames of torch and of ours.

    Frames of the user's model stay; torch.export has a hundred, and raises while it handles another error.
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
