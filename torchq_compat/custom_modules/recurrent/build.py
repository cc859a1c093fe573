"""Float LSTM or LSTMCell -> observed module: one prepared cell per layer and direction."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchq_compat.custom_modules.recurrent.cell_graph import CellDtypes, CellGraphModule, prepare_cell
from torchq_compat.custom_modules.recurrent.constructors import CellSpecs
from torchq_compat.custom_modules.recurrent.contract import LSTMStructure
from torchq_compat.custom_modules.recurrent.lstm import LSTMLayer, ObservedLSTM
from torchq_compat.custom_modules.recurrent.lstm_cell import LSTMCellFloat, example_inputs
from torchq_compat.custom_modules.recurrent.parts import lstm_parts
from torchq_compat.custom_modules.recurrent.single_cell import ObservedLSTMCell

__all__ = ["build_observed_cell", "build_observed_lstm"]

WEIGHT_NAMES = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")


def build_observed_lstm(lstm: nn.LSTM, specs: CellSpecs, *, split_gates: bool = False) -> ObservedLSTM:
    """An observed LSTM with copies of the parameters of ``lstm``."""
    structure = LSTMStructure.of(lstm)
    layers = []
    for layer in range(structure.num_layers):
        arriving = specs.hidden_dtype if layer else specs.op_specs.activation_dtype
        cells = [
            _prepared_cell(_weights(lstm, f"_l{layer}{direction}"), specs, arriving, split_gates=split_gates)
            for direction in ("", "_reverse")[: structure.num_directions]
        ]
        layers.append(LSTMLayer(cells[0], cells[1] if len(cells) > 1 else None))
    observed = ObservedLSTM(structure, layers)
    observed.split_gates = split_gates
    observed.specs = specs
    observed.qconfig = specs.op_specs.qconfig
    observed.train(lstm.training)
    return observed


def build_observed_cell(
    cell: nn.LSTMCell, specs: CellSpecs, *, split_gates: bool = False
) -> ObservedLSTMCell:
    """An observed LSTMCell with copies of the parameters of ``cell``."""
    prepared = _prepared_cell(
        _weights(cell, ""), specs, specs.op_specs.activation_dtype, split_gates=split_gates
    )
    observed = ObservedLSTMCell(prepared, cell.input_size, cell.hidden_size, bias=cell.bias)
    observed.split_gates = split_gates
    observed.specs = specs
    observed.qconfig = specs.op_specs.qconfig
    observed.train(cell.training)
    return observed


def _weights(module: nn.Module, suffix: str) -> dict[str, Tensor]:
    found = {name: getattr(module, f"{name}{suffix}", None) for name in WEIGHT_NAMES}
    return {name: value for name, value in found.items() if value is not None}


def _prepared_cell(
    weights: dict[str, Tensor], specs: CellSpecs, arriving: torch.dtype, *, split_gates: bool
) -> CellGraphModule:
    cell = LSTMCellFloat(weights, split_gates=split_gates)
    return prepare_cell(
        cell,
        example_inputs(cell, weights["weight_ih"].device),
        lstm_parts(split_gates=split_gates, projected="weight_hr" in weights),
        specs,
        CellDtypes(x=arriving, hidden=specs.hidden_dtype),
    )
