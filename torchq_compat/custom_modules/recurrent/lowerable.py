"""Converted recurrent modules that can run in the cell loop: lowered, and while torch.compile traces them."""

from __future__ import annotations

import copy
from typing import Self

import torch

from torchq_compat.custom_modules.leaf_module import LeafModule

__all__ = ["Lowerable"]


class Lowerable(LeafModule):
    """A module that runs as it is, or in the cell loop."""

    is_lowered = False
    #: The cell loop reads and writes floats.
    leaf_in_floats = property(lambda self: self.is_lowered)

    def runs_on_integers(self) -> bool:
        """Whether calls go to the cell loop."""
        return self.is_lowered or (torch.compiler.is_compiling() and not torch.compiler.is_exporting())

    def lowered(self) -> Self:
        """This module in the cell loop, with the same state. A cell the loop cannot run runs as before."""
        lowered = copy.copy(self)
        lowered.is_lowered = True
        return lowered
