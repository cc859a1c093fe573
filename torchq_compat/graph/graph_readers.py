"""Telling code that walks the graph of one of our models that it finds no layers there.

Legacy: FX's graphs call modules, so scripts and toolkits look for ``call_module`` nodes of layers; those of
torch.export have operators. ``torchq-compat run`` enables this, for code that was written for FX's graphs.
"""

from __future__ import annotations

import linecache
import sys
from types import FrameType

from torchq_compat.support.user_warnings import warn_user

__all__ = ["tell_graph_readers", "told_of_layers"]

OWN = "torchq_compat."
#: The packages that read graphs for their own purposes.
READERS = (OWN, "torch.", "torchao.")
_TELLS: list[bool] = []


def tell_graph_readers() -> None:
    """Warn whoever reads the graph of one of our models, from now on in this process."""
    _TELLS[:] = [True]


def told_of_layers(stage: str) -> None:
    """Warn the code that reads the graph of a model, unless it is a library's, or only prints it.
    It is called in the property ``graph`` of our models."""
    if not _TELLS:
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _name(frame).startswith(OWN) and frame.f_code.co_name == "graph":
        frame = frame.f_back
    if frame is None or _name(frame).startswith(READERS):
        return
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    if "print" not in line:
        warn_user(
            f"the graph of a {stage} model is torch.export's: its layers are aten operators, and code that "
            "looks for call_module nodes of layers finds none. Observers are called as in FX, by other "
            "numbers, those of weights among them; explain(model) has every op with its module."
        )


def _name(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))
