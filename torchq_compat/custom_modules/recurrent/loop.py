"""Recurrent modules over sequences, observed and converted: layers of cells in the calling contract.

A cell's observers are shared by all time steps; layers and directions have their own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from torchq_compat.custom_modules.layouts import CallLayout
from torchq_compat.custom_modules.part_graph import converted_grids
from torchq_compat.custom_modules.part_specs import PartSpecs
from torchq_compat.custom_modules.recurrent.cell_graph import (
    CellGraphModule,
    reference_cell,
)
from torchq_compat.custom_modules.recurrent.cell_owner import CellOwner, ConvertedModule, ObservedModule
from torchq_compat.custom_modules.recurrent.contract import (
    RecurrentStructure,
    RunLayers,
    State,
    bound_input,
    call_recurrent,
)
from torchq_compat.custom_modules.recurrent.layers import RecurrentDirection, RecurrentLayer
from torchq_compat.custom_modules.recurrent.native.columns import ColumnGrids, column_grids, grids_of_call
from torchq_compat.custom_modules.recurrent.opaque_call import call_opaque, is_exported_opaque
from torchq_compat.custom_modules.recurrent.prepared_cell import prepared_cell
from torchq_compat.specs.dtypes import as_dtype
from torchq_compat.specs.grids import Grid, PerTensorGrid, combine_along

__all__ = ["ConvertedLoop", "ObservedLoop", "RecurrentLoop"]


class RecurrentLoop(CellOwner):
    """What the observed and the converted module have in common: everything but the class they pass for.

    The cells compute in float32; inputs of another float dtype are cast on the way in and out.

    Args:
        structure: the constructor arguments of the float module.
        layers: the cells.
    """

    def __init__(self, structure: RecurrentStructure, layers: list[RecurrentLayer]) -> None:
        super().__init__()
        self.structure = structure
        self.layers = nn.ModuleList(layers)
        for direction in layers[0].directions():
            direction.batch_first = structure.batch_first

    input_size = property(lambda self: self.structure.input_size)
    hidden_size = property(lambda self: self.structure.hidden_size)
    num_layers = property(lambda self: self.structure.num_layers)
    bias = property(lambda self: self.structure.bias)
    batch_first = property(lambda self: self.structure.batch_first)
    dropout = property(lambda self: self.structure.dropout)
    bidirectional = property(lambda self: self.structure.bidirectional)
    proj_size = property(lambda self: self.structure.proj_size)

    def leaf_call(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """As the float module: ``rnn(x)``, ``rnn(x, state)``, ``rnn(x, hx=state)``; x may be a
        PackedSequence, the output then is one.

        Raises:
            CustomModuleError: arguments the float module would refuse.
        """
        return call_recurrent(self.structure, self.module_path, self._run_layers, args, kwargs)

    def cells(self) -> Iterator[tuple[str, CellGraphModule]]:
        for index, layer in enumerate(self._layers()):
            for name, direction in zip(("layer_fw", "layer_bw"), layer.directions(), strict=False):
                yield f"layers.{index}.{name}.cell", direction.cell

    def _layers(self) -> list[RecurrentLayer]:
        return [layer for layer in self.layers if isinstance(layer, RecurrentLayer)]

    def result_dtypes(self, count: int) -> tuple[torch.dtype | None, ...]:
        states = [self.specs.group_dtype(state.group) for state in self.structure.kind.states]
        return states[0], *states

    def _run_layers(
        self,
        x: Tensor,
        state: State | None,
        batch_sizes: list[int] | None = None,
        *,
        columns: ColumnGrids | None = None,
    ) -> tuple[Tensor, State]:
        dtype = x.dtype
        states = self._states(x, state, batch_sizes)
        x = as_dtype(x, torch.float32)
        if is_exported_opaque():
            x, last = call_opaque([layer.opaque() for layer in self._layers()], x, states)
        else:
            x, last = self._loop(x, states, batch_sizes, columns)
        return as_dtype(x, dtype), tuple(
            as_dtype(torch.stack(rows), dtype) for rows in zip(*last, strict=True)
        )

    def _loop(
        self,
        x: Tensor,
        states: list[State],
        batch_sizes: list[int] | None,
        columns: ColumnGrids | None,
    ) -> tuple[Tensor, list[State]]:
        last: list[State] = []
        for index, layer in enumerate(self._layers()):
            if index and self.structure.dropout:
                x = F.dropout(x, self.structure.dropout, self.training)
            first = index * self.structure.num_directions
            x, ends = layer(x, states[first : first + self.structure.num_directions], batch_sizes, columns)
            last.extend(ends)
            columns = None if columns is None else layer.output_columns(self.structure.output_size)
        return x, last

    def _states(self, x: Tensor, state: State | None, batch_sizes: list[int] | None) -> list[State]:
        """The initial state of every layer and direction."""
        if state is not None:
            return list(zip(*(as_dtype(each, torch.float32).unbind(0) for each in state), strict=True))
        first_step = as_dtype(x[0] if batch_sizes is None else x[: batch_sizes[0]], torch.float32)
        return [cell.initial_state(self.structure.state_widths, first_step) for _, cell in self.cells()]


class ObservedLoop(RecurrentLoop, ObservedModule):
    """A recurrent module over sequences whose parts are observed, or fake-quantized, one by one."""

    @classmethod
    def with_prepared_cells(cls, module: nn.Module, specs: PartSpecs, *, split_gates: bool) -> Self:
        assert isinstance(module, nn.RNNBase)
        structure = RecurrentStructure.of(module)
        hidden = specs.group_dtype(structure.kind.states[0].group)

        def direction(layer: int, suffix: str) -> RecurrentDirection:
            parameters, arriving = f"_l{layer}{suffix}", hidden if layer else None
            cell = prepared_cell(module, specs, split_gates=split_gates, suffix=parameters, arriving=arriving)
            return RecurrentDirection(cell)

        suffixes = ("", "_reverse")[: structure.num_directions]
        layers = [
            RecurrentLayer([direction(layer, suffix) for suffix in suffixes])
            for layer in range(structure.num_layers)
        ]
        return cls(structure, layers)


class ConvertedLoop(RecurrentLoop, ConvertedModule):
    """A recurrent module over sequences made of q-dq cells."""

    leaf_results_on_grids = True

    def leaf_call(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return self._call_on(None, args, kwargs)

    def leaf_call_from_graph(self, layout: CallLayout, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._call_on(bound_input(self.module_path, *grids_of_call(layout)), args, kwargs)

    def _call_on(self, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """A call whose input lies on ``grid``, if that is known; a PackedSequence of grids for one."""
        run_layers: RunLayers = self._run_layers
        if self.runs_on_integers():
            x = bound_input(self.module_path, args, kwargs)
            if isinstance(x, PackedSequence):
                x, grid = x.data, None if grid is None else grid.data
            columns = column_grids(grid, self.input_size, x.dim())
            run_layers = partial(self._run_layers, columns=columns)
        return call_recurrent(self.structure, self.module_path, run_layers, args, kwargs)

    @classmethod
    def with_converted_cells(cls, other: RecurrentLoop) -> Self:
        layers = []
        for layer in other.layers:
            assert isinstance(layer, RecurrentLayer)
            cells = [reference_cell(copy.deepcopy(direction.cell)) for direction in layer.directions()]
            layers.append(RecurrentLayer([RecurrentDirection(cell) for cell in cells]))
        return cls(other.structure, layers)

    def leaf_output_grids(self, results: list[Tensor]) -> tuple[Grid | None, ...]:
        """Grids of output and last states; per-channel where layers or directions have different ones."""
        by_state = list(zip(*(converted_grids(cell) for _, cell in self.cells()), strict=True))
        last_layer = by_state[0][-self.structure.num_directions :]
        return (
            _combine(results[0].dim() - 1, last_layer, self.structure.output_size),
            *(_combine(0, grids, 1) for grids in by_state),
        )


def _combine(axis: int, grids: tuple[PerTensorGrid | None, ...], size: int) -> Grid | None:
    known = [grid for grid in grids if grid is not None]
    if len(known) != len(grids):
        return None
    return combine_along(axis, [(grid, size) for grid in known])
