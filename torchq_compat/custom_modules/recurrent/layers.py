"""Layers and directions of a recurrent module: a cell, run over time.

The paths are those of ``torch.ao.nn.quantizable.LSTM``: ``layers.<i>.layer_fw.cell`` and
``layers.<i>.layer_bw.cell``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchq_compat.custom_modules.loop_shape import LoopShape, shape_in_export
from torchq_compat.custom_modules.recurrent.cell_graph import CellGraphModule, ConvertedCellGraphModule
from torchq_compat.custom_modules.recurrent.native.columns import ColumnGrids
from torchq_compat.custom_modules.recurrent.native.directions import (
    run_native_direction,
    run_native_packed_direction,
)
from torchq_compat.custom_modules.recurrent.opaque_call import OpaqueDirection
from torchq_compat.custom_modules.recurrent.over_time import (
    State,
    Step,
    project_as_given,
    run_looped_direction,
    run_packed_direction,
    run_rolled_direction,
)
from torchq_compat.specs.grids import q_dq

__all__ = ["RecurrentDirection", "RecurrentLayer"]


class RecurrentDirection(nn.Module):
    """One direction of one layer: its cell, run over time."""

    #: Whether ``x`` comes as a view (T, B, I) of what was given as (B, T, I).
    batch_first = False

    def __init__(self, cell: CellGraphModule) -> None:
        super().__init__()
        self.cell = cell

    def forward(
        self,
        x: Tensor,
        state: State,
        *,
        backward: bool = False,
        batch_sizes: list[int] | None = None,
        columns: ColumnGrids | None = None,
    ) -> tuple[Tensor, State]:
        """``x`` (T, B, I), states (B, width) -> (T, B, P) and the last states. With ``batch_sizes``, ``x``
        and the result are the packed rows of a PackedSequence. With ``columns``, the grids of ``x``, a
        converted cell runs on integers."""
        cell = self.cell
        if torch.compiler.is_exporting() and isinstance(cell, ConvertedCellGraphModule):
            return self._exported(cell, x, state, backward=backward)
        program = cell.program() if isinstance(cell, ConvertedCellGraphModule) else None
        if columns is not None and program is not None:
            if batch_sizes is None:
                return run_native_direction(cell, program, x, state, columns, backward=backward)
            return run_native_packed_direction(
                cell, program, x, state, batch_sizes, columns, backward=backward
            )
        step, inputs = self._hoisted(x)
        if batch_sizes is not None:
            return run_packed_direction(step, inputs, state, batch_sizes, backward=backward)
        return run_looped_direction(step, inputs, state, backward=backward)

    def _hoisted(self, x: Tensor) -> tuple[Step, tuple[Tensor, ...]]:
        """The function of one time step, and its inputs of all steps. A cell with hooks is called itself."""
        cell = self.cell
        if not isinstance(cell, ConvertedCellGraphModule) or cell._forward_hooks or cell._forward_pre_hooks:
            return cell, (x,)
        return cell.repeated_step(), self._project(cell, x)

    def _project(self, cell: ConvertedCellGraphModule, x: Tensor) -> tuple[Tensor, ...]:
        return project_as_given(cell.project, x, batch_first=self.batch_first)

    def _exported(
        self, cell: ConvertedCellGraphModule, x: Tensor, state: State, *, backward: bool
    ) -> tuple[Tensor, State]:
        """With q-dq of their own grids behind the results, which change no value: a backend does not see into
        the loop."""
        inputs = self._project(cell, x)
        if shape_in_export() is LoopShape.UNROLLED:
            output, last = run_looped_direction(cell.repeated_step(), inputs, state, backward=backward)
        else:
            step, weights = cell.step_of_weights()
            output, last = run_rolled_direction(step, weights, inputs, state, backward=backward)
        hidden, *_ = grids = cell.state_grids()
        return q_dq(output, hidden), tuple(q_dq(*pair) for pair in zip(last, grids, strict=True))

    def opaque(self) -> OpaqueDirection:
        """This direction, converted, for the opaque operator."""
        return OpaqueDirection(self.cell, batch_first=self.batch_first)


class RecurrentLayer(nn.Module):
    """One layer: forward, and backward if bidirectional."""

    def __init__(self, directions: Sequence[RecurrentDirection]) -> None:
        super().__init__()
        self.layer_fw = directions[0]
        if len(directions) > 1:
            self.layer_bw = directions[1]

    def directions(self) -> tuple[RecurrentDirection, ...]:
        return (self.layer_fw, self.layer_bw) if hasattr(self, "layer_bw") else (self.layer_fw,)

    def output_columns(self, width: int) -> ColumnGrids:
        """On which grids the output of converted cells lies, ``width`` columns for each direction."""
        return tuple((width, direction.cell.state_grids()[0]) for direction in self.directions())

    def opaque(self) -> list[OpaqueDirection]:
        """The directions for the opaque operator."""
        return [direction.opaque() for direction in self.directions()]

    def forward(
        self,
        x: Tensor,
        states: list[State],
        batch_sizes: list[int] | None = None,
        columns: ColumnGrids | None = None,
    ) -> tuple[Tensor, list[State]]:
        """``x`` (T, B, I) and one state per direction -> (T, B, D*P) and the last states."""
        results = [
            direction(x, state, backward=index == 1, batch_sizes=batch_sizes, columns=columns)
            for index, (direction, state) in enumerate(zip(self.directions(), states, strict=True))
        ]
        outputs = [output for output, _ in results]
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)), [last for _, last in results]
