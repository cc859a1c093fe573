"""Functions that captured a model for PT2E and were removed from torch. Names only, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["REMOVED_CAPTURES", "RemovedCapture"]


class RemovedCapture(NamedTuple):
    """A removed function that ``torch.export.export`` replaces.

    Attributes:
        module, name: its old place.
        gave_module: whether it returned the graph module, not the exported program.
    """

    module: str
    name: str
    gave_module: bool


#: Full name -> the removed function.
REMOVED_CAPTURES: Mapping[str, RemovedCapture] = {
    f"{each.module}.{each.name}": each
    for each in (
        RemovedCapture("torch._export", "capture_pre_autograd_graph", gave_module=True),
        RemovedCapture("torch.export", "export_for_training", gave_module=False),
        RemovedCapture("torch.export._trace", "_export_for_training", gave_module=False),
    )
}
