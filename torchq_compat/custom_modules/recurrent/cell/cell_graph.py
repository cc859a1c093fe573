"""A cell as a graph of parts, with the qparams of its initial states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from torch import Tensor
from torch.fx import Graph, GraphModule

from torchq_compat.custom_modules.parts.part_graph import (
    ConvertedPartGraphModule,
    PartGraphModule,
    convert_parts,
    converted_qparams,
)
from torchq_compat.custom_modules.recurrent.cell.input_projection import CellFunctions
from torchq_compat.custom_modules.recurrent.native.cell_reader import program_or_problem
from torchq_compat.custom_modules.recurrent.native.program import CellProgram
from torchq_compat.qspecs.qparams import PerTensorQParams
from torchq_compat.support import metadata

__all__ = ["CellGraphModule", "ConvertedCellGraphModule", "reference_cell"]

DEFAULT_INITIAL = (1.0, 0)


class CellGraphModule(PartGraphModule):
    """A prepared or converted cell, with the initial-state qparams of ``torch.ao.nn.quantizable.LSTMCell``.

    An omitted state is zeros; a converted cell quantizes the zeros with this (scale, zero point). FX's cell
    has the attributes but never reads them.
    """

    @property
    def initial_hidden_state_qparams(self) -> tuple[float, int]:
        return self._initial_qparams(0)

    @initial_hidden_state_qparams.setter
    def initial_hidden_state_qparams(self, qparams: tuple[float, int]) -> None:
        self._set_initial_qparams(0, qparams)

    @property
    def initial_cell_state_qparams(self) -> tuple[float, int]:
        return self._initial_qparams(1)

    @initial_cell_state_qparams.setter
    def initial_cell_state_qparams(self, qparams: tuple[float, int]) -> None:
        self._set_initial_qparams(1, qparams)

    # In meta, because GraphModule.__deepcopy__ drops other attributes.
    def _initial_qparams(self, index: int) -> tuple[float, int]:
        return (metadata.INITIAL_STATES.of(self) or {}).get(index, DEFAULT_INITIAL)

    def _set_initial_qparams(self, index: int, qparams: tuple[float, int]) -> None:
        metadata.INITIAL_STATES.write(self, {**(metadata.INITIAL_STATES.of(self) or {}), index: qparams})

    def state_qparams(self) -> tuple[PerTensorQParams | None, ...]:
        """Return the qparams of every new state in a converted cell."""
        return converted_qparams(self)

    def program(self) -> CellProgram | None:
        """Return this cell as a program for the cell loop; None if the loop cannot run it."""
        return None

    def program_problem(self) -> str | None:
        """Return the reason why the cell loop cannot run this cell; None if it can."""
        return "it is not converted"

    def starts_at_zero(self) -> bool:
        """Return whether an omitted state is exactly zeros, without initial-state qparams."""
        return all(
            qparams == DEFAULT_INITIAL for qparams in (metadata.INITIAL_STATES.of(self) or {}).values()
        )

    def initial_state(self, widths: Sequence[int], x: Tensor) -> tuple[Tensor, ...]:
        """Return the states of a call that passes none: zeros (B, width) each, quantized with the
        initial-state qparams in a converted cell."""
        return tuple(
            _with_initial_qparams(x.new_zeros(x.shape[0], width), qparams, self._initial_qparams(index))
            for index, (width, qparams) in enumerate(zip(widths, self.state_qparams(), strict=True))
        )


def _with_initial_qparams(
    zeros: Tensor, qparams: PerTensorQParams | None, given: tuple[float, int]
) -> Tensor:
    if qparams is None or given == DEFAULT_INITIAL:
        return zeros
    initial = replace(qparams, scale=given[0], zero_point=given[1])
    return initial.dequantize(initial.quantize(zeros))


class ConvertedCellGraphModule(ConvertedPartGraphModule, CellGraphModule):
    """A q-dq cell: its state_dict carries all qparams.

    ``cell(x, *states)`` equals ``cell.step(*cell.project(x), *states)``, except that a linear may sum in
    another order when it has more rows.
    """

    def recompile(self) -> Any:
        """Recompile ``forward``, and derive the qparams, functions and program from the graph again."""
        self._state_qparams = converted_qparams(self)
        self.__dict__.pop("_functions", None)
        self._program = program_or_problem(("", self))
        return super().recompile()

    # Not in recompile, which copies and passes call again and again: six functions are compiled.
    @cached_property
    def _functions(self) -> CellFunctions:
        return CellFunctions.of(self, self.graph)

    def program(self) -> CellProgram | None:
        """Return the program, see ``CellGraphModule``; None also if the cell has hooks."""
        if self._forward_hooks or self._forward_pre_hooks or isinstance(self._program, str):
            return None
        return self._program

    def program_problem(self) -> str | None:
        return self._program if isinstance(self._program, str) else None

    def state_qparams(self) -> tuple[PerTensorQParams | None, ...]:
        return self._state_qparams

    def projection_graph(self) -> Graph:
        """Return the graph x -> projected, the part of the cell that depends only on x. Its attributes are
        those of the cell."""
        return self._functions.graphs.first

    def step_graph(self) -> Graph:
        """Return the graph (*projected, *states) -> the new states. Its attributes are those of the cell."""
        return self._functions.graphs.rest

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs of ``step`` that depend on ``x`` (..., I), for all steps at once; (..., width)
        each."""
        return self._functions.project(self, x)

    def step(self, *projected_and_states: Tensor) -> tuple[Tensor, ...]:
        """Return the new states, given the results of ``project`` for one step and the states, (B, width)
        each."""
        return self._functions.step(self, *projected_and_states)

    def repeated_step(self) -> Callable[..., tuple[Tensor, ...]]:
        """Return ``step`` for many steps in a row; the weights are dequantized once, in this call."""
        return partial(self._functions.step_of_constants, self, *self._functions.constants(self))

    def step_of_weights(self) -> tuple[Callable[..., tuple[Tensor, ...]], tuple[Tensor, ...]]:
        """Return ``step`` as a function of (*weights, *projected, *states), and the stored, quantized
        weights."""
        return partial(self._functions.step_of_weights, self), self._functions.weights(self)


def reference_cell(prepared: GraphModule) -> ConvertedCellGraphModule:
    """Return the q-dq form of a prepared cell with int8 weights folded. Changes ``prepared``: pass a copy."""
    return ConvertedCellGraphModule.wrap(convert_parts(prepared))
