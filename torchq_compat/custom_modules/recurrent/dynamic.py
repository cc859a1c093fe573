"""Recurrent modules quantized dynamically: integer weights, activations quantized as they come.

Legacy: ``torch.ao.nn.quantized.dynamic.LSTM``, ``GRU`` and the cells, which FX puts in for a dynamic QConfig
without a mapping. As there, the input projection of all steps is one linear, whose input is quantized as a
whole, and the hidden state is quantized step by step. No parts but the linears are quantized.
"""

from __future__ import annotations

import copy
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from torchq_compat.custom_modules.part import PartKind
from torchq_compat.custom_modules.part_graph import (
    ConvertedPartGraphModule,
    PartGraphModule,
    convert_parts,
    prepare_parts,
)
from torchq_compat.custom_modules.part_owner import PartOwner
from torchq_compat.custom_modules.part_specs import PartSpecs
from torchq_compat.custom_modules.recurrent.cell_graph import (
    CellGraphModule,
    ConvertedCellGraphModule,
    reference_cell,
)
from torchq_compat.custom_modules.recurrent.contract import RecurrentStructure, State
from torchq_compat.custom_modules.recurrent.float_cell import FloatCell
from torchq_compat.custom_modules.recurrent.kinds import CellKind, kind_of
from torchq_compat.custom_modules.recurrent.layers import RecurrentDirection, RecurrentLayer
from torchq_compat.custom_modules.recurrent.loop import LowerableLoop
from torchq_compat.custom_modules.recurrent.lowerable import Lowerable
from torchq_compat.custom_modules.recurrent.native.cell_reader import program_or_problem
from torchq_compat.custom_modules.recurrent.native.columns import ColumnGrids
from torchq_compat.custom_modules.recurrent.native.directions import OwnedProgram, run_native_direction
from torchq_compat.custom_modules.recurrent.opaque_call import OpaqueDirection
from torchq_compat.custom_modules.recurrent.prepared_cell import float_cell
from torchq_compat.custom_modules.recurrent.single_cell import LowerableCell

__all__ = ["DynamicCell", "DynamicLoop", "convert_dynamic", "prepare_dynamic"]


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


class DynamicDirection(RecurrentDirection):
    """One direction of one layer: all inputs projected at once, then the cell over time."""

    def __init__(self, input_projection: GraphModule, cell: CellGraphModule) -> None:
        super().__init__(cell)
        self.input_projection = input_projection
        self._read_program()
        # Qparams are literals of the graphs; with a state come new ones.
        self.register_load_state_dict_post_hook(_read_program_again)  # type: ignore[no-untyped-call]

    def _read_program(self) -> None:
        graphs = (("input_projection", self.input_projection), ("cell", self.cell))
        converted = isinstance(self.cell, ConvertedCellGraphModule)
        self._program = program_or_problem(*graphs) if converted else "it is not converted"

    def program(self) -> OwnedProgram | None:
        return None if isinstance(self._program, str) else OwnedProgram(self, self._program)

    def program_problem(self) -> str | None:
        return self._program if isinstance(self._program, str) else None

    def forward(
        self,
        x: Tensor,
        state: State,
        *,
        backward: bool = False,
        batch_sizes: list[int] | None = None,
        columns: ColumnGrids | None = None,
    ) -> tuple[Tensor, State]:
        program = self.program()
        # The grid of a packed input is chosen from all of it, which the cell loop takes in pieces.
        if columns is not None and program is not None and batch_sizes is None:
            return run_native_direction(program, x, state, columns, backward=backward)
        (projected,) = self.input_projection(x)
        return super().forward(projected, state, backward=backward, batch_sizes=batch_sizes)

    def opaque(self) -> OpaqueDirection:
        return OpaqueDirection(self.cell, self.input_projection)


def _read_program_again(direction: DynamicDirection, _incompatible_keys: Any) -> None:
    direction._read_program()


class Dynamic(Lowerable, PartOwner):
    """Results are floats."""

    def result_dtypes(self, count: int) -> tuple[torch.dtype | None, ...]:
        return (None,) * count


class DynamicLoop(Dynamic, LowerableLoop):
    """An LSTM, GRU or RNN quantized dynamically: prepared, with float weights, or converted."""

    @classmethod
    def prepare(cls, module: nn.RNNBase, specs: PartSpecs) -> Self:
        structure = RecurrentStructure.of(module)
        suffixes = ("", "_reverse")[: structure.num_directions]
        layers = [
            RecurrentLayer([_prepared_direction(module, f"_l{layer}{suffix}", specs) for suffix in suffixes])
            for layer in range(structure.num_layers)
        ]
        return cls(structure, layers)

    def converted(self) -> Self:
        layers = []
        for layer in self.layers:
            assert isinstance(layer, RecurrentLayer)
            layers.append(RecurrentLayer([_converted_direction(d) for d in layer.directions()]))
        return type(self)(self.structure, layers)


class DynamicCell(Dynamic, LowerableCell):
    """An LSTMCell, GRUCell or RNNCell quantized dynamically: prepared or converted."""

    @classmethod
    def prepare(cls, module: nn.RNNCellBase, specs: PartSpecs) -> Self:
        kind, cell = kind_of(module), float_cell(module, "", split_gates=False)
        prepared = CellGraphModule.wrap(_prepare(kind, cell, cell.example_inputs(), specs))
        return cls(kind, prepared, module.input_size, module.hidden_size, bias=module.bias)

    def converted(self) -> Self:
        cell = reference_cell(copy.deepcopy(self.cell))
        return type(self)(self.kind, cell, self.input_size, self.hidden_size, bias=self.bias)


def prepare_dynamic(module: nn.Module, specs: PartSpecs) -> DynamicLoop | DynamicCell:
    """``module`` with copies of its parameters, its linears marked for dynamic quantization."""
    made: DynamicLoop | DynamicCell
    if isinstance(module, nn.RNNBase):
        made = DynamicLoop.prepare(module, specs)
    else:
        assert isinstance(module, nn.RNNCellBase)
        made = DynamicCell.prepare(module, specs)
    made.specs = specs
    made.split_gates = False
    made.qconfig = specs.op_specs.qconfig
    made.train(module.training)
    return made


def convert_dynamic(prepared: DynamicLoop | DynamicCell) -> DynamicLoop | DynamicCell:
    """The q-dq form of ``prepared``, which is left as it is: integer weights folded."""
    converted = prepared.converted()
    converted.take_over(prepared)
    converted.split_gates = False
    return converted


def _prepared_direction(module: nn.RNNBase, suffix: str, specs: PartSpecs) -> DynamicDirection:
    kind, cell = kind_of(module), float_cell(module, suffix, split_gates=False)
    x, *states = cell.example_inputs()
    projection = _prepare(kind, InputProjection(cell), (x.expand(3, *x.shape),), specs)
    (projected,) = (tensor.clone() for tensor in cell.project(x))
    step = _prepare(kind, ProjectedStep(cell), (projected.detach(), *states), specs, "cell.")
    return DynamicDirection(PartGraphModule.wrap(projection), CellGraphModule.wrap(step))


def _prepare(
    kind: CellKind, module: nn.Module, example: tuple[Tensor, ...], specs: PartSpecs, prefix: str = ""
) -> GraphModule:
    linears = [part for part in kind.parts(split_gates=False, projected=True) if part.kind is PartKind.LINEAR]
    return prepare_parts(module, example, linears, specs, {}, prefix=prefix)


def _converted_direction(direction: RecurrentDirection) -> DynamicDirection:
    assert isinstance(direction, DynamicDirection)
    projection = ConvertedPartGraphModule.wrap(convert_parts(copy.deepcopy(direction.input_projection)))
    return DynamicDirection(projection, reference_cell(copy.deepcopy(direction.cell)))
