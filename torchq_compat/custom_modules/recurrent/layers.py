"""Layers and directions of a recurrent module: a cell, run over time in a Python loop.

The paths are those of ``torch.ao.nn.quantizable.LSTM``: ``layers.<i>.layer_fw.cell`` and
``layers.<i>.layer_bw.cell``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchq_compat.custom_modules.part_graph import ConvertedPartGraphModule
from torchq_compat.custom_modules.recurrent.cell_graph import CellGraphModule
from torchq_compat.custom_modules.recurrent.contract import State
from torchq_compat.custom_modules.recurrent.packed import run_packed_direction
from torchq_compat.custom_modules.recurrent.rolled import run_rolled_direction

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
        if batch_sizes is not None:
            return run_packed_direction(self.cell, x, state, batch_sizes, backward=backward)
        if torch.compiler.is_exporting() and isinstance(self.cell, ConvertedPartGraphModule):
            return run_rolled_direction(self.cell, x, state, backward=backward)
        steps = x.unbind(0)
        outputs = []
        for step in reversed(steps) if backward else steps:
            state = tuple(self.cell(step, *state))
            outputs.append(state[0])
        if backward:
            outputs.reverse()
        return torch.stack(outputs), state


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
