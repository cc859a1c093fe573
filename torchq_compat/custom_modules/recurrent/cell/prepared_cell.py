"""Makes the prepared cells of a float recurrent module, one for each layer and direction."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from torchq_compat.capture.capture_by_structure import capture_by_structure
from torchq_compat.custom_modules.parts.part_graph import prepare_parts
from torchq_compat.custom_modules.parts.part_specs import PartSpecs
from torchq_compat.custom_modules.recurrent.cell.cell_graph import CellGraphModule
from torchq_compat.custom_modules.recurrent.cell.float_cell import FloatCell
from torchq_compat.custom_modules.recurrent.cell.kinds import kind_of

__all__ = ["float_cell", "prepared_cell", "weights_of"]

WEIGHT_NAMES = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")


def prepared_cell(
    module: nn.Module,
    specs: PartSpecs,
    *,
    split_gates: bool,
    suffix: str = "",
    input_dtype: torch.dtype | None = None,
) -> CellGraphModule:
    """Return the prepared cell with copies of the parameters of ``module`` whose names end in ``suffix``.

    ``input_dtype`` is the quantized dtype of the cell's input; default: the QConfig's activation dtype.
    """
    kind = kind_of(module)
    cell, weights = float_cell(module, suffix, split_gates=split_gates), _weights(module, suffix)
    prepared = prepare_parts(
        capture_by_structure(cell, cell.example_inputs()),
        kind.parts(split_gates=split_gates, projected="weight_hr" in weights),
        specs,
        {
            "x": input_dtype or specs.op_specs.activation_dtype,
            "hx": specs.group_dtype(kind.states[0].group),
        },
    )
    return CellGraphModule.wrap(prepared)


def float_cell(module: nn.Module, suffix: str, *, split_gates: bool) -> FloatCell:
    """Return the float cell with copies of the parameters of ``module`` whose names end in ``suffix``."""
    return kind_of(module).float_cell(_weights(module, suffix), split_gates=split_gates)


def _weights(module: nn.Module, suffix: str) -> dict[str, Tensor]:
    found = {name: getattr(module, f"{name}{suffix}", None) for name in WEIGHT_NAMES}
    return {name: value for name, value in found.items() if value is not None}


#: Name of a projection in a cell -> the names of its weight and bias in torch.nn.
PROJECTIONS = {
    "igates": ("weight_ih", "bias_ih"),
    "hgates": ("weight_hh", "bias_hh"),
    "projection": ("weight_hr", ""),
}


def weights_of(cell: GraphModule) -> dict[str, Tensor]:
    """Return the parameters of a prepared cell by their names in torch.nn, without a suffix; the weights of
    split gates are concatenated."""
    pieces: dict[str, list[Tensor]] = {}
    for path, parameter in cell.named_parameters():
        projection, *_, kind = path.split(".")
        weight, bias = PROJECTIONS[projection]
        pieces.setdefault(weight if kind == "weight" else bias, []).append(parameter)
    return {name: torch.cat(values) for name, values in pieces.items()}
