"""Recurrent modules quantized dynamically: integer weights, activations quantized as they come.

Legacy: ``torch.ao.nn.quantized.dynamic.LSTM``, ``GRU`` and the cells, which FX puts in for a dynamic QConfig
without a mapping. As there, the input projection of all steps is one linear, whose input is quantized as a
whole, and the hidden state is quantized step by step. No parts but the linears are quantized.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from torchq_compat.custom_modules.parts.part import PartKind
from torchq_compat.custom_modules.parts.part_graph import PartGraphModule, prepare_parts
from torchq_compat.custom_modules.parts.part_specs import PartSpecs
from torchq_compat.custom_modules.recurrent.cell.cell_graph import CellGraphModule
from torchq_compat.custom_modules.recurrent.cell.float_cell import FloatCell
from torchq_compat.custom_modules.recurrent.cell.kinds import CellKind, kind_of
from torchq_compat.custom_modules.recurrent.cell.prepared_cell import float_cell
from torchq_compat.custom_modules.recurrent.modules.contracts import RecurrentContract, contract_of
from torchq_compat.custom_modules.recurrent.modules.layers import RecurrentDirection, RecurrentLayer
from torchq_compat.custom_modules.recurrent.modules.recurrent_module import RecurrentModule

__all__ = ["DynamicRecurrent", "convert_dynamic", "prepare_dynamic"]


class InputProjection(nn.Module):
    """``W_ih x + b_ih`` of all steps: (T, B, I) -> (T, B, G*H)."""

    def __init__(self, cell: FloatCell) -> None:
        super().__init__()
        self.igates = cell.igates

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.igates(x),)


class ProjectedStep(nn.Module):
    """One step behind its input projection: the cell, called with what ``InputProjection`` gave."""

    def __init__(self, cell: FloatCell) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, projected: Tensor, hx: Tensor, cx: Tensor | None = None) -> tuple[Tensor, ...]:
        return self.cell.step([projected], *(state for state in (hx, cx) if state is not None))


class DynamicRecurrent(RecurrentModule):
    """A recurrent module quantized dynamically: prepared, with float weights, or converted. Its results are
    floats."""

    can_be_lowered = True

    def result_dtypes(self, count: int) -> tuple[torch.dtype | None, ...]:
        return (None,) * count


def prepare_dynamic(module: nn.Module, specs: PartSpecs) -> DynamicRecurrent:
    """Return ``module`` with copies of its parameters, its linears marked for dynamic quantization."""
    contract = contract_of(module)
    made = DynamicRecurrent(contract, _prepared_layers(contract, module, specs))
    made.specs = specs
    made.split_gates = False
    made.qconfig = specs.op_specs.qconfig
    made.train(module.training)
    return made


def convert_dynamic(prepared: DynamicRecurrent) -> DynamicRecurrent:
    """Return the q-dq form of ``prepared``, which is left as it is: integer weights folded."""
    converted = DynamicRecurrent(prepared.contract, prepared.converted_layers())
    converted.take_over_from(prepared)
    return converted


def _prepared_layers(
    contract: RecurrentContract, module: nn.Module, specs: PartSpecs
) -> list[RecurrentLayer]:
    if isinstance(module, nn.RNNCellBase):
        kind, cell = contract.kind, float_cell(module, "", split_gates=False)
        prepared = CellGraphModule.wrap(_prepare(kind, cell, cell.example_inputs(), specs))
        return [RecurrentLayer([RecurrentDirection(prepared)])]
    return [
        RecurrentLayer([_prepared_direction(module, suffix, specs) for suffix in suffixes])
        for suffixes in contract.suffixes()
    ]


def _prepared_direction(module: nn.Module, suffix: str, specs: PartSpecs) -> RecurrentDirection:
    kind, cell = kind_of(module), float_cell(module, suffix, split_gates=False)
    x, *states = cell.example_inputs()
    projection = _prepare(kind, InputProjection(cell), (x.expand(3, *x.shape),), specs)
    (projected,) = (tensor.clone() for tensor in cell.project(x))
    step = _prepare(kind, ProjectedStep(cell), (projected.detach(), *states), specs, "cell.")
    return RecurrentDirection(CellGraphModule.wrap(step), PartGraphModule.wrap(projection))


def _prepare(
    kind: CellKind, module: nn.Module, example: tuple[Tensor, ...], specs: PartSpecs, prefix: str = ""
) -> GraphModule:
    linears = [part for part in kind.parts(split_gates=False, projected=True) if part.kind is PartKind.LINEAR]
    return prepare_parts(module, example, linears, specs, {}, prefix=prefix)
