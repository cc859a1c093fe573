"""Float LSTM -> observed LSTM: one prepared cell per layer and direction."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from torchq_compat.custom_modules.recurrent.cell_graph import CellDtypes, prepare_cell
from torchq_compat.custom_modules.recurrent.constructors import CellSpecs
from torchq_compat.custom_modules.recurrent.contract import LSTMStructure
from torchq_compat.custom_modules.recurrent.lstm import LSTMLayer, ObservedLSTM
from torchq_compat.custom_modules.recurrent.lstm_cell import LSTMCellFloat, example_inputs
from torchq_compat.custom_modules.recurrent.parts import lstm_parts

__all__ = ["build_observed_lstm"]

WEIGHT_NAMES = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")


def build_observed_lstm(lstm: nn.LSTM, specs: CellSpecs, *, split_gates: bool = False) -> ObservedLSTM:
    """An observed LSTM with copies of the parameters of ``lstm``."""
    structure = LSTMStructure.of(lstm)
    layers = []
    for layer in range(structure.num_layers):
        cells = [
            _prepared_cell(lstm, structure, specs, layer, suffix, split_gates=split_gates)
            for suffix in ("", "_reverse")[: structure.num_directions]
        ]
        layers.append(LSTMLayer(cells[0], cells[1] if len(cells) > 1 else None))
    observed = ObservedLSTM(structure, layers)
    observed.split_gates = split_gates
    observed.qconfig = specs.op_specs.qconfig
    observed.hidden_dtype = _hidden_dtype(structure, specs)
    observed.train(lstm.training)
    return observed


def _prepared_cell(
    lstm: nn.LSTM, structure: LSTMStructure, specs: CellSpecs, layer: int, suffix: str, *, split_gates: bool
) -> GraphModule:
    weights: dict[str, Tensor] = {
        name: getattr(lstm, f"{name}_l{layer}{suffix}")
        for name in WEIGHT_NAMES
        if hasattr(lstm, f"{name}_l{layer}{suffix}")
    }
    cell = LSTMCellFloat(weights, split_gates=split_gates)
    hidden = _hidden_dtype(structure, specs)
    arriving = CellDtypes(x=hidden if layer else specs.op_specs.activation_dtype, hidden=hidden)
    weight = weights["weight_ih"]
    return prepare_cell(
        cell,
        example_inputs(cell, weight.device, weight.dtype),
        lstm_parts(split_gates=split_gates, projected=structure.proj_size > 0),
        specs,
        arriving,
    )


def _hidden_dtype(structure: LSTMStructure, specs: CellSpecs) -> torch.dtype:
    last = lstm_parts(split_gates=False, projected=structure.proj_size > 0)[-1]
    return specs.output_constructor(last).settings.dtype
