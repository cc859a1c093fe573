"""The observed and the converted LSTM: prepared or converted cells, and a Python loop over time.

Legacy: ``torch.ao.nn.quantizable.LSTM`` (observed) and ``torch.ao.nn.quantized.LSTM`` (converted), with the
cells at the same paths, ``layers.<i>.layer_fw.cell`` and ``layers.<i>.layer_bw.cell``. A cell's observers are
shared by all time steps; layers and directions have their own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchq_compat.custom_modules.layouts import CallLayout
from torchq_compat.custom_modules.leaf_module import LeafModule
from torchq_compat.custom_modules.recurrent.cell_graph import (
    CellGraphModule,
    converted_grids,
    reference_cell,
)
from torchq_compat.custom_modules.recurrent.constructors import CellSpecs
from torchq_compat.custom_modules.recurrent.contract import LSTMStructure, State, call_lstm
from torchq_compat.custom_modules.recurrent.errors import RecurrentModuleError
from torchq_compat.custom_modules.recurrent.packed import run_packed_direction
from torchq_compat.specs.grids import Grid, PerTensorGrid, combine_along

__all__ = ["ConvertedLSTM", "LSTMDirection", "LSTMLayer", "LSTMLoop", "ObservedLSTM"]


class LSTMDirection(nn.Module):
    """One direction of one layer: its cell, run over time."""

    def __init__(self, cell: CellGraphModule) -> None:
        super().__init__()
        self.cell = cell

    def forward(
        self, x: Tensor, state: State, *, backward: bool = False, batch_sizes: list[int] | None = None
    ) -> tuple[Tensor, State]:
        """``x`` (T, B, I), state (B, P) and (B, H) -> (T, B, P) and the last state. With ``batch_sizes``,
        ``x`` and the result are the packed rows of a PackedSequence."""
        if batch_sizes is not None:
            return run_packed_direction(self.cell, x, state, batch_sizes, backward=backward)
        h, c = state
        steps = x.unbind(0)
        outputs = []
        for step in reversed(steps) if backward else steps:
            h, c = self.cell(step, h, c)
            outputs.append(h)
        if backward:
            outputs.reverse()
        return torch.stack(outputs), (h, c)


class LSTMLayer(nn.Module):
    """One layer: forward, and backward if bidirectional."""

    def __init__(self, forward_cell: CellGraphModule, backward_cell: CellGraphModule | None) -> None:
        super().__init__()
        self.layer_fw = LSTMDirection(forward_cell)
        if backward_cell is not None:
            self.layer_bw = LSTMDirection(backward_cell)

    def directions(self) -> tuple[LSTMDirection, ...]:
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


class LSTMLoop(LeafModule):
    """What the observed and the converted LSTM have in common: everything but the class they pass for.

    The cells compute in float32; inputs of another float dtype are cast on the way in and out.

    Args:
        structure: the constructor arguments of the float LSTM.
        layers: the cells.
    """

    specs: CellSpecs
    split_gates: bool
    qconfig: Any

    def __init__(self, structure: LSTMStructure, layers: list[LSTMLayer]) -> None:
        # Not super().__init__: the legacy class would make float layers with random weights.
        nn.Module.__init__(self)
        self.structure = structure
        self.module_path = ""
        self.layers = nn.ModuleList(layers)
        self.layouts: list[CallLayout] = []

    input_size = property(lambda self: self.structure.input_size)
    hidden_size = property(lambda self: self.structure.hidden_size)
    num_layers = property(lambda self: self.structure.num_layers)
    bias = property(lambda self: self.structure.bias)
    batch_first = property(lambda self: self.structure.batch_first)
    dropout = property(lambda self: self.structure.dropout)
    bidirectional = property(lambda self: self.structure.bidirectional)
    proj_size = property(lambda self: self.structure.proj_size)

    def call(self, *args: Any, **kwargs: Any) -> tuple[Any, State]:
        """As ``torch.nn.LSTM``: ``lstm(x)``, ``lstm(x, (h, c))``, ``lstm(x, hx=(h, c))``; x may be a
        PackedSequence, the output then is one.

        Raises:
            CustomModuleError: arguments ``torch.nn.LSTM`` would refuse.
        """
        return call_lstm(self.structure, self.module_path, self._run_layers, args, kwargs)

    def cells(self) -> Iterator[tuple[str, CellGraphModule]]:
        """(path inside the module, cell) of every layer and direction."""
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, LSTMLayer)
            for name, direction in zip(("layer_fw", "layer_bw"), layer.directions(), strict=False):
                yield f"layers.{index}.{name}.cell", direction.cell

    def _run_layers(
        self, x: Tensor, state: State | None, batch_sizes: list[int] | None = None
    ) -> tuple[Tensor, State]:
        dtype = x.dtype
        states = self._states(x, state, batch_sizes)
        x = x.float()
        last: list[State] = []
        for index, layer in enumerate(self.layers):
            if index and self.structure.dropout:
                x = F.dropout(x, self.structure.dropout, self.training)
            first = index * self.structure.num_directions
            x, ends = layer(x, states[first : first + self.structure.num_directions], batch_sizes)
            last.extend(ends)
        h_n, c_n = (torch.stack(rows).to(dtype) for rows in zip(*last, strict=True))
        return x.to(dtype), (h_n, c_n)

    def _states(self, x: Tensor, state: State | None, batch_sizes: list[int] | None) -> list[State]:
        """The initial state of every layer and direction."""
        if state is not None:
            return list(zip(state[0].float().unbind(0), state[1].float().unbind(0), strict=True))
        widths = (self.structure.output_size, self.structure.hidden_size)
        first_step = (x[0] if batch_sizes is None else x[: batch_sizes[0]]).float()
        return [cell.initial_state(widths, first_step) for _, cell in self.cells()]


class ObservedLSTM(LSTMLoop, torch.ao.nn.quantizable.LSTM):
    """An LSTM whose parts are observed, or fake-quantized, one by one."""

    def _get_name(self) -> str:
        return "QuantizableLSTM"

    @classmethod
    def from_float(cls, other: nn.LSTM, qconfig: Any = None, split_gates: bool = False) -> ObservedLSTM:
        """Legacy signature. ``qconfig`` is used where ``other`` has none.

        Raises:
            ConfigError: neither has a qconfig.
        """
        from torchq_compat.lstm_utils import get_lstm_with_individually_observed_parts

        if getattr(other, "qconfig", None) is None:
            other = copy.copy(other)
            other.qconfig = qconfig
        return get_lstm_with_individually_observed_parts(other, split_gates=split_gates)


class ConvertedLSTM(LSTMLoop, torch.ao.nn.quantized.LSTM):
    """An LSTM of q-dq cells with folded integer weights."""

    def _get_name(self) -> str:
        return "QuantizedLSTM"

    @classmethod
    def from_observed(cls, other: torch.ao.nn.quantizable.LSTM) -> ConvertedLSTM:
        """Convert every cell of ``other``, which is left as it is.

        Raises:
            CustomModuleError: ``other`` was not observed by this package.
        """
        if not isinstance(other, ObservedLSTM):
            raise RecurrentModuleError.unusable_result("observed_lstm", "from_float", other)
        layers = []
        for layer in other.layers:
            assert isinstance(layer, LSTMLayer)
            cells = [reference_cell(copy.deepcopy(direction.cell)) for direction in layer.directions()]
            layers.append(LSTMLayer(cells[0], cells[1] if len(cells) > 1 else None))
        converted = cls(other.structure, layers)
        converted.specs, converted.split_gates = other.specs, other.split_gates
        converted.module_path = other.module_path
        converted.layouts = list(other.layouts)
        converted.train(other.training)
        return converted

    def output_grids(self, results: list[Tensor]) -> tuple[Grid | None, ...]:
        """Grids of output, h_n and c_n; per-channel where layers or directions have different ones."""
        grids = [converted_grids(cell) for _, cell in self.cells()]
        hidden = [pair[0] for pair in grids]
        cell_state = [pair[1] for pair in grids]
        last_layer = hidden[-self.structure.num_directions :]
        return (
            _combine(results[0].dim() - 1, last_layer, self.structure.output_size),
            _combine(0, hidden, 1),
            _combine(0, cell_state, 1),
        )


def _combine(axis: int, grids: list[PerTensorGrid | None], size: int) -> Grid | None:
    known = [grid for grid in grids if grid is not None]
    if len(known) != len(grids):
        return None
    return combine_along(axis, [(grid, size) for grid in known])
