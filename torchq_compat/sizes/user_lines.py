"""The user's line that runs: the place in code that a guard on sizes is told with."""

from __future__ import annotations

import linecache
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

__all__ = ["Place", "place_in_code"]

TORCH = Path(torch.__file__).parent
PACKAGE = Path(__file__).parents[1]
STANDARD, PACKAGES = Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))
#: Code that evaluates numbers, and does not decide by them.
EVALUATING = (
    str(TORCH / "fx" / "experimental"),
    str(TORCH / "__init__.py"),
    str(TORCH / "_tensor.py"),
    str(TORCH / "overrides.py"),
    str(Path(__file__).parent),
    str(PACKAGE / "capture" / "unseen_python.py"),
    str(PACKAGE / "packed_sequences" / "packing_mode.py"),
)
#: Beginnings of the file names of generated code.
GENERATED = ("<frozen", "<eval_with_key", "<string>")
#: The frame that captures: what called it is not the model's code.
EXPORT = str(PACKAGE / "capture" / "torch_export.py")


@dataclass(frozen=True)
class Place:
    """A place in code.

    Attributes:
        line: file, line and text of the user's code; None if it is unknown.
        by_user: whether the user's own Python asked, and not a module or function of torch or this package,
            which checks its arguments.
    """

    line: str | None = None
    by_user: bool = False


def place_in_code() -> Place:
    """Return the innermost line that runs and belongs neither to torch, nor to this package or Python."""
    frame: FrameType | None = sys._getframe(1)
    by_user: bool | None = None
    while frame is not None and frame.f_code.co_filename != EXPORT:
        path = frame.f_code.co_filename
        is_library = _is_of_libraries(path)
        if by_user is None and not path.startswith(EVALUATING):
            by_user = not is_library
        if not is_library and not path.startswith(GENERATED):
            text = linecache.getline(path, frame.f_lineno).strip()
            return Place(f"{Path(path).name}:{frame.f_lineno} ({text})", bool(by_user))
        frame = frame.f_back
    return Place()


def _is_of_libraries(path: str) -> bool:
    is_python = _is_inside(path, STANDARD) and not _is_inside(path, PACKAGES)
    return is_python or _is_inside(path, TORCH) or _is_inside(path, PACKAGE)


def _is_inside(path: str, root: Path) -> bool:
    return path.startswith(f"{root}/")
