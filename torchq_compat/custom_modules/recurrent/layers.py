"""Layers and directions of a recurrent module: a cell, run over time.

The paths are those of ``torch.ao.nn.quantizable.LSTM``: ``layers.<i>.layer_fw.cell`` and
``layers.<i>.layer_bw.cell``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchq_compat.custom_modules.recurrent.cell_graph import CellGraphModule, ConvertedCellGraphModule
from torchq_compat.custom_modules.recurrent.over_time import (
    State,
    Step,
    run_looped_direction,
    run_packed_direction,
    run_rolled_direction,
)

__all__ = ["RecurrentDirection", "RecurrentLayer"]


class RecurrentDirection(nn.Module):
    """One direction of one layer: its cell, run over time."""

    def __init__(self, cell: CellGraphModule) -> None:
        super().__init__()
        self.cell = cell

    def forward(
        self, x: Tensor, state: State, *, backward: bool = False, batch_sizes: list[int] | None = None
    ) -> tuple[Tensor, State]:
        """``x`` (T, B, I), states (B, width) -> (T, B, P) and the last states. With ``batch_sizes``, ``x``
        and the result are the packed rows of a PackedSequence."""
        rolled = torch.compiler.is_exporting() and isinstance(self.cell, ConvertedCellGraphModule)
        step, inputs = self.hoisted(x, rolled=rolled)
        if batch_sizes is not None:
            return run_packed_direction(step, inputs, state, batch_sizes, backward=backward)
        run = run_rolled_direction if rolled else run_looped_direction
        return run(step, inputs, state, backward=backward)

    def hoisted(self, x: Tensor, *, rolled: bool) -> tuple[Step, tuple[Tensor, ...]]:
        """The function of one time step, and its inputs of all steps: what a converted cell computes of ``x``
        alone is computed once. A cell with hooks is called itself."""
        cell = self.cell
        if not isinstance(cell, ConvertedCellGraphModule) or cell._forward_hooks or cell._forward_pre_hooks:
            return cell, (x,)
        return (cell.step if rolled else cell.repeated_step()), cell.project(x)


class RecurrentLayer(nn.Module):
    """One layer: forward, and backward if bidirectional."""

    def __init__(self, directions: Sequence[RecurrentDirection]) -> None:
        super().__init__()
        self.layer_fw = directions[0]
        if len(directions) > 1:
            self.layer_bw = directions[1]

    def directions(self) -> tuple[RecurrentDirection, ...]:
        return (self.layer_fw, self.layer_bw) if hasattr(self, "layer_bw") else (self.layer_fw,)

    def forward(
        self, x: Tensor, states: list[State], batch_sizes: list[int] | None = None
    ) -> tuple[Tensor, list[State]]:
        """``x`` (T, B, I) and one state per direction -> (T, B, D*P) and the last states."""
        results = [
            direction(x, state, backward=index == 1, batch_sizes=batch_sizes)
            for index, (direction, state) in enumerate(zip(self.directions(), states, strict=True))
        ]
        outputs = [output for output, _ in results]
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)), [last for _, last in results]
