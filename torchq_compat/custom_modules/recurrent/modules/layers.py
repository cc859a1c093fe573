"""Layers and directions of a recurrent module: the modules that hold the cells.

The paths are those of ``torch.ao.nn.quantizable.LSTM``: ``layers.<i>.layer_fw.cell`` and
``layers.<i>.layer_bw.cell``.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from torch import Tensor, nn
from torch.fx import GraphModule

from torchq_compat.custom_modules.parts.part_graph import ConvertedPartGraphModule, convert_parts
from torchq_compat.custom_modules.recurrent.cell.cell_graph import (
    CellGraphModule,
    ConvertedCellGraphModule,
    reference_cell,
)
from torchq_compat.custom_modules.recurrent.native.bound_module import BoundDirection, OwnedProgram
from torchq_compat.custom_modules.recurrent.native.cell_reader import program_or_problem
from torchq_compat.custom_modules.recurrent.native.columns import ColumnQParams
from torchq_compat.custom_modules.recurrent.native.program import CellProgram
from torchq_compat.custom_modules.recurrent.over_time import (
    State,
    Step,
    project_as_given,
    run_looped_direction,
    run_packed_direction,
)

__all__ = ["RecurrentDirection", "RecurrentLayer"]


class RecurrentDirection(nn.Module):
    """One direction of one layer: its cell, and the input projection of all steps.

    Args:
        cell: (x, *states) -> the new states; prepared or converted.
        input_projection: x of all steps -> the input of the cell at all steps; None: the cell's input is x.
    """

    #: Whether ``x`` is a view (T, B, I) of a tensor that the caller passed as (B, T, I).
    batch_first = False

    def __init__(self, cell: CellGraphModule, input_projection: GraphModule | None = None) -> None:
        super().__init__()
        self.cell = cell
        self.input_projection = input_projection
        self._read_program()
        # Qparams are literals of the graphs; loading a state changes them.
        self.register_load_state_dict_post_hook(_read_program_again)  # type: ignore[no-untyped-call]

    def forward(
        self,
        x: Tensor,
        state: State,
        *,
        backward: bool = False,
        batch_sizes: list[int] | None = None,
    ) -> tuple[Tensor, State]:
        """Run the cell in a Python loop: ``x`` (T, B, I), states (B, width) -> (T, B, P) and the last states.
        With ``batch_sizes``, ``x`` and the result are the rows of a PackedSequence."""
        x = self.project_first(x)
        step, inputs = self._step_and_inputs(x)
        if batch_sizes is not None:
            return run_packed_direction(step, inputs, state, batch_sizes, backward=backward)
        return run_looped_direction(step, inputs, state, backward=backward)

    def project_first(self, x: Tensor) -> Tensor:
        """Return the input projection of ``x``, all steps at once; ``x`` itself if there is none."""
        if self.input_projection is None:
            return x
        (projected,) = self.input_projection(x)
        assert isinstance(projected, Tensor)
        return projected

    def project(self, cell: ConvertedCellGraphModule, x: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs of the steps of a converted ``cell``, computed for all steps of ``x`` at once."""
        return project_as_given(cell.project, x, batch_first=self.batch_first)

    def _step_and_inputs(self, x: Tensor) -> tuple[Step, tuple[Tensor, ...]]:
        """Return the function of one time step, and its inputs at all steps. A cell with hooks is called
        directly, so that they run."""
        cell = self.cell
        if not isinstance(cell, ConvertedCellGraphModule) or cell._forward_hooks or cell._forward_pre_hooks:
            return cell, (x,)
        return cell.repeated_step(), self.project(cell, x)

    def graphs(self) -> list[GraphModule]:
        """Return the graphs of this direction, in the order of computation."""
        return [self.cell] if self.input_projection is None else [self.input_projection, self.cell]

    def converted(self) -> RecurrentDirection:
        """Return a converted copy with integer weights folded."""
        projection = self.input_projection
        if projection is not None:
            projection = ConvertedPartGraphModule.wrap(convert_parts(copy.deepcopy(projection)))
        return RecurrentDirection(reference_cell(copy.deepcopy(self.cell)), projection)

    def program(self) -> OwnedProgram | None:
        """Return the program that the cell loop runs for this direction; None if it cannot run it."""
        cell = self.cell
        if not isinstance(cell, ConvertedCellGraphModule):
            return None
        if self.input_projection is None:
            program = cell.program()
            return None if program is None else OwnedProgram(cell, program)
        return None if isinstance(self._program, str) else OwnedProgram(self, self._program)

    def current_program(self) -> CellProgram | None:
        """Return the program of ``program()`` without its owner; None if there is none."""
        owned = self.program()
        return None if owned is None else owned.program

    def bound(self) -> BoundDirection | None:
        """Return this direction for a ``BoundModule``; None if the cell loop cannot run it."""
        owned = self.program()
        if owned is None:
            return None
        current = self.cell.program if self.input_projection is None else self.current_program
        return BoundDirection(owned, self.cell, current)

    def program_problem(self) -> str | None:
        """Return the reason why the cell loop cannot run this direction; None if it can."""
        if self.input_projection is None:
            return self.cell.program_problem()
        return self._program if isinstance(self._program, str) else None

    def _read_program(self) -> None:
        """Read the program of input projection and cell; a cell without a projection has its own program."""
        self._program = (
            "it is not converted"
            if self.input_projection is None or not isinstance(self.cell, ConvertedCellGraphModule)
            else program_or_problem(("input_projection", self.input_projection), ("cell", self.cell))
        )


def _read_program_again(direction: RecurrentDirection, _incompatible_keys: object) -> None:
    direction._read_program()


class RecurrentLayer(nn.Module):
    """One layer: forward, and backward if bidirectional."""

    def __init__(self, directions: Sequence[RecurrentDirection]) -> None:
        super().__init__()
        self.layer_fw = directions[0]
        if len(directions) > 1:
            self.layer_bw = directions[1]

    def directions(self) -> tuple[RecurrentDirection, ...]:
        return (self.layer_fw, self.layer_bw) if hasattr(self, "layer_bw") else (self.layer_fw,)

    def output_columns(self, width: int) -> ColumnQParams:
        """Return the qparams of the columns of the layer's output, ``width`` columns for each direction; the
        cells are converted."""
        return tuple((width, direction.cell.state_qparams()[0]) for direction in self.directions())

    def converted(self) -> RecurrentLayer:
        """Return a converted copy."""
        return RecurrentLayer([direction.converted() for direction in self.directions()])
