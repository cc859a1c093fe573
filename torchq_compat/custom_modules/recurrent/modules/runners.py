"""Runners: what carries a recurrent module's cells over time.

A runner takes the layers of a module, the input of all steps and the initial states. Which one runs a call is
chosen in one place, ``RecurrentModule.runner``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from torchq_compat.custom_modules.recurrent.cell.cell_graph import CellGraphModule, ConvertedCellGraphModule
from torchq_compat.custom_modules.recurrent.exported_op.op_calls import OpaqueDirection, call_opaque
from torchq_compat.custom_modules.recurrent.loop_shape import LoopShape, shape_in_export
from torchq_compat.custom_modules.recurrent.modules.layers import RecurrentDirection, RecurrentLayer
from torchq_compat.custom_modules.recurrent.modules.over_time import (
    State,
    run_looped_direction,
    run_rolled_direction,
)
from torchq_compat.custom_modules.recurrent.native.columns import ColumnQParams
from torchq_compat.custom_modules.recurrent.native.directions import (
    OwnedProgram,
    run_native_direction,
    run_native_packed_direction,
)
from torchq_compat.qspecs.qparams import q_dq

__all__ = ["NativeRunner", "OpaqueRunner", "PythonRunner", "Runner", "Sequences", "TracedRunner"]


@dataclass(frozen=True)
class Sequences:
    """The input of all steps.

    Attributes:
        x: (T, B, I) float32; with ``batch_sizes`` the packed rows of a PackedSequence.
        batch_sizes: rows of each step, the longest sequences first.
        columns: the qparams of the columns of ``x``, for a runner on integers.
    """

    x: Tensor
    batch_sizes: list[int] | None = None
    columns: ColumnQParams | None = None


class Runner(ABC):
    """Runs layers, or one step of a cell."""

    #: Whether it wants to know the qparams of its input's columns.
    reads_columns = False

    def run_layers(
        self, layers: Sequence[RecurrentLayer], given: Sequences, states: list[State], dropout: float
    ) -> tuple[Tensor, list[State]]:
        """Run all ``layers``, with ``dropout`` between them.

        Args:
            states: (B, width) each, of every layer and direction.

        Returns:
            The output (T, B, D*P), or its packed rows, and the last states, as ``states``.
        """
        last: list[State] = []
        for index, layer in enumerate(layers):
            if index and dropout:
                given = Sequences(F.dropout(given.x, dropout), given.batch_sizes, given.columns)
            outputs = []
            for position, direction in enumerate(layer.directions()):
                output, end = self.run_direction(direction, given, states[len(last)], backward=position == 1)
                outputs.append(output)
                last.append(end)
            x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
            columns = None if given.columns is None else layer.output_columns(outputs[0].shape[-1])
            given = Sequences(x, given.batch_sizes, columns)
        return given.x, last

    @abstractmethod
    def run_direction(
        self, direction: RecurrentDirection, given: Sequences, state: State, *, backward: bool
    ) -> tuple[Tensor, State]:
        """Run one direction of one layer: the hidden states of all steps (T, B, P), and the last states."""

    def run_step(
        self, cell: CellGraphModule, x: Tensor, state: State, columns: ColumnQParams | None
    ) -> State:
        """Run one step: ``x`` (B, I) and the states -> the new states."""
        return tuple(cell(x, *state))


class PythonRunner(Runner):
    """A loop in Python: observed modules, and converted ones in eager mode."""

    def run_direction(
        self, direction: RecurrentDirection, given: Sequences, state: State, *, backward: bool
    ) -> tuple[Tensor, State]:
        result: tuple[Tensor, State] = direction(
            given.x, state, backward=backward, batch_sizes=given.batch_sizes
        )
        return result


class TracedRunner(Runner):
    """Runs converted cells for torch.export to trace: as a ``scan``, or step by step.

    Behind the results stand q-dq of their own qparams, which change no value: a backend does not see into the
    loop.
    """

    def run_direction(
        self, direction: RecurrentDirection, given: Sequences, state: State, *, backward: bool
    ) -> tuple[Tensor, State]:
        cell = direction.cell
        if not isinstance(cell, ConvertedCellGraphModule):
            return PythonRunner().run_direction(direction, given, state, backward=backward)
        inputs = direction.project(cell, direction.project_first(given.x))
        if shape_in_export() is LoopShape.UNROLLED:
            output, last = run_looped_direction(cell.repeated_step(), inputs, state, backward=backward)
        else:
            step, weights = cell.step_of_weights()
            output, last = run_rolled_direction(step, weights, inputs, state, backward=backward)
        hidden, *_ = all_qparams = cell.state_qparams()
        return q_dq(output, hidden), tuple(q_dq(*pair) for pair in zip(last, all_qparams, strict=True))


class OpaqueRunner(TracedRunner):
    """One operator for the whole module, in an export that asks for it."""

    def run_layers(
        self, layers: Sequence[RecurrentLayer], given: Sequences, states: list[State], dropout: float
    ) -> tuple[Tensor, list[State]]:
        handed = [[_opaque(direction) for direction in layer.directions()] for layer in layers]
        return call_opaque(handed, given.x, states)

    def run_step(
        self, cell: CellGraphModule, x: Tensor, state: State, columns: ColumnQParams | None
    ) -> State:
        _, [new] = call_opaque([[OpaqueDirection(cell)]], x.unsqueeze(0), [state])
        return new


def _opaque(direction: RecurrentDirection) -> OpaqueDirection:
    return OpaqueDirection(direction.cell, direction.input_projection, direction.batch_first)


class NativeRunner(PythonRunner):
    """The compiled cell loop. A cell that it cannot run is run in Python."""

    reads_columns = True

    def run_direction(
        self, direction: RecurrentDirection, given: Sequences, state: State, *, backward: bool
    ) -> tuple[Tensor, State]:
        program, columns = direction.program(), given.columns
        if program is None or columns is None:
            return super().run_direction(direction, given, state, backward=backward)
        if given.batch_sizes is None:
            return run_native_direction(program, given.x, state, columns, backward=backward)
        if direction.input_projection is not None:
            # Dynamic qparams of a packed input are chosen from all of it, which the cell loop takes in
            # pieces.
            return super().run_direction(direction, given, state, backward=backward)
        return run_native_packed_direction(
            program, given.x, state, given.batch_sizes, columns, backward=backward
        )

    def run_step(
        self, cell: CellGraphModule, x: Tensor, state: State, columns: ColumnQParams | None
    ) -> State:
        program = cell.program()
        if program is None or columns is None:
            return super().run_step(cell, x, state, columns)
        owned = OwnedProgram(cell, program)
        return run_native_direction(owned, x[None], state, columns, backward=False)[1]
