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
from torch.fx import GraphModule

from torchq_compat.custom_modules.leaf_module import LeafModule
from torchq_compat.custom_modules.layouts import CallLayout
from torchq_compat.custom_modules.recurrent.cell_graph import converted_grids, reference_cell
from torchq_compat.custom_modules.recurrent.contract import LSTMStructure, State, call_lstm
from torchq_compat.specs.grids import Grid, PerTensorGrid, combine_along

__all__ = ["ConvertedLSTM", "LSTMDirection", "LSTMLayer", "LSTMLoop", "ObservedLSTM"]


class LSTMDirection(nn.Module):
    """One direction of one layer: its cell, run over time."""

    def __init__(self, cell: GraphModule) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor, state: State, *, backward: bool = False) -> tuple[Tensor, State]:
        """``x`` (T, B, I), state (B, P) and (B, H) -> (T, B, P) and the last state."""
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

    def __init__(self, forward_cell: GraphModule, backward_cell: GraphModule | None) -> None:
        super().__init__()
        self.layer_fw = LSTMDirection(forward_cell)
        if backward_cell is not None:
            self.layer_bw = LSTMDirection(backward_cell)

    def directions(self) -> tuple[LSTMDirection, ...]:
        return (self.layer_fw, self.layer_bw) if hasattr(self, "layer_bw") else (self.layer_fw,)

    def forward(self, x: Tensor, states: list[State]) -> tuple[Tensor, list[State]]:
        """``x`` (T, B, I) and one state per direction -> (T, B, D*P) and the last states."""
        results = [
            direction(x, state, backward=index == 1)
            for index, (direction, state) in enumerate(zip(self.directions(), states, strict=True))
        ]
        outputs = [output for output, _ in results]
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)), [last for _, last in results]


class LSTMLoop(LeafModule):
    """What the observed and the converted LSTM have in common: everything but the class they pass for.

    Args:
        structure: the constructor arguments of the float LSTM.
        layers: the cells.
        compute_dtype: dtype the cells compute in, float32; other dtypes are cast at the boundary.
    """

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
        """As ``torch.nn.LSTM``: ``lstm(x)``, ``lstm(x, (h, c))``, ``lstm(x, hx=(h, c))``."""
        return call_lstm(self.structure, self.module_path, self._run_layers, args, kwargs)

    def cells(self) -> Iterator[tuple[str, GraphModule]]:
        """(path inside the module, cell) of every layer and direction."""
        for index, layer in enumerate(self.layers):
            for name, direction in zip(("layer_fw", "layer_bw"), layer.directions(), strict=False):
                yield f"layers.{index}.{name}.cell", direction.cell

    def _run_layers(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        directions = self.structure.num_directions
        h0, c0 = state[0].unbind(0), state[1].unbind(0)
        last: list[State] = []
        for index, layer in enumerate(self.layers):
            rows = range(index * directions, (index + 1) * directions)
            if index and self.structure.dropout:
                x = F.dropout(x, self.structure.dropout, self.training)
            x, states = layer(x, [(h0[row], c0[row]) for row in rows])
            last.extend(states)
        return x, (torch.stack([h for h, _ in last]), torch.stack([c for _, c in last]))


class ObservedLSTM(LSTMLoop, torch.ao.nn.quantizable.LSTM):
    """An LSTM whose parts are observed, or fake-quantized, one by one."""

    qconfig: Any
    hidden_dtype: torch.dtype
    split_gates: bool

    def _get_name(self) -> str:
        return "QuantizableLSTM"


class ConvertedLSTM(LSTMLoop, torch.ao.nn.quantized.LSTM):
    """An LSTM of q-dq cells with folded integer weights."""

    def _get_name(self) -> str:
        return "QuantizedLSTM"

    @classmethod
    def from_prepared(cls, observed: ObservedLSTM) -> ConvertedLSTM:
        """Convert every cell of ``observed``, which is left as it is."""
        layers = []
        for layer in observed.layers:
            cells = [reference_cell(copy.deepcopy(direction.cell)) for direction in layer.directions()]
            layers.append(LSTMLayer(cells[0], cells[1] if len(cells) > 1 else None))
        converted = cls(observed.structure, layers)
        converted.module_path = observed.module_path
        converted.layouts = list(observed.layouts)
        converted.train(observed.training)
        return converted

    def output_grids(self, results: list[Tensor]) -> tuple[Grid | None, ...]:
        """Grids of output, h_n and c_n; per-channel where layers or directions have different ones."""
        grids = [converted_grids(cell) for _, cell in self.cells()]
        hidden = [pair[0] for pair in grids]
        cell_state = [pair[1] for pair in grids]
        last_layer = hidden[-self.structure.num_directions :]
        output, h_n, c_n = results
        return (
            _combine(output.dim() - 1, last_layer, self.structure.output_size),
            _combine(0, hidden, 1),
            _combine(0, cell_state, 1),
        )


def _combine(axis: int, grids: list[PerTensorGrid | None], size: int) -> Grid | None:
    known = [grid for grid in grids if grid is not None]
    if len(known) != len(grids):
        return None
    return combine_along(axis, [(grid, size) for grid in known])
