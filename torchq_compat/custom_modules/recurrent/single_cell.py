"""LSTMCell, GRUCell and RNNCell, observed and converted: one cell, called once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn

from torchq_compat.custom_modules.layouts import CallLayout
from torchq_compat.custom_modules.leaf_op import FakeCall
from torchq_compat.custom_modules.part_graph import converted_grids
from torchq_compat.custom_modules.part_specs import PartSpecs
from torchq_compat.custom_modules.recurrent.cell_graph import (
    CellGraphModule,
    ConvertedCellGraphModule,
    reference_cell,
)
from torchq_compat.custom_modules.recurrent.cell_owner import CellOwner, ConvertedModule, ObservedModule
from torchq_compat.custom_modules.recurrent.contract import as_given, check_state_count, shown
from torchq_compat.custom_modules.recurrent.kinds import CellKind, kind_of
from torchq_compat.custom_modules.recurrent.native.columns import column_grids, grids_of_call
from torchq_compat.custom_modules.recurrent.native.directions import run_native_direction
from torchq_compat.custom_modules.recurrent.opaque_call import (
    OpaqueDirection,
    call_opaque,
    is_exported_opaque,
)
from torchq_compat.custom_modules.recurrent.prepared_cell import prepared_cell
from torchq_compat.errors import CustomModuleError
from torchq_compat.specs.dtypes import as_dtype
from torchq_compat.specs.grids import Grid

__all__ = ["ConvertedCell", "ObservedCell", "SingleCell", "fake_cell"]


class SingleCell(CellOwner):
    """What the observed and the converted cell have in common. ``cell`` computes in float32."""

    def __init__(
        self, kind: CellKind, cell: CellGraphModule, input_size: int, hidden_size: int, *, bias: bool
    ) -> None:
        super().__init__()
        self.kind = kind
        self.cell = cell
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.bias = bias

    def cells(self) -> Iterator[tuple[str, CellGraphModule]]:
        yield "cell", self.cell

    def result_dtypes(self, count: int) -> tuple[torch.dtype | None, ...]:
        return tuple(self.specs.group_dtype(state.group) for state in self.kind.states)

    def leaf_call(self, input: Tensor, hx: Any = None) -> Any:
        """As the float cell: input (B, I) or (I,), each state (B, H) or (H,), or None.

        Raises:
            CustomModuleError: arguments the float cell would refuse.
        """
        return self._call(self.cell, input, hx)

    def _call(self, cell: Callable[..., Iterable[Tensor]], input: Tensor, hx: Any = None) -> Any:
        states = check_cell_call(self.kind, self.module_path, self.input_size, self.hidden_size, input, hx)
        batched = input.dim() == 2
        x = as_dtype(input if batched else input.unsqueeze(0), torch.float32)
        if states is None:
            widths = (self.hidden_size,) * len(self.kind.states)
            states = self.cell.initial_state(widths, x)
        elif not batched:
            states = tuple(state.unsqueeze(0) for state in states)
        states = tuple(as_dtype(state, torch.float32) for state in states)
        if is_exported_opaque():
            _, [new] = call_opaque([[OpaqueDirection(self.cell)]], x.unsqueeze(0), [states])
        else:
            new = tuple(cell(x, *states))
        new = tuple(as_dtype(state, input.dtype) for state in new)
        return as_given(new if batched else tuple(state.squeeze(0) for state in new))


class ObservedCell(SingleCell, ObservedModule):
    """A cell whose parts are observed, or fake-quantized, one by one."""

    @classmethod
    def with_prepared_cells(cls, module: nn.Module, specs: PartSpecs, *, split_gates: bool) -> Self:
        assert isinstance(module, nn.RNNCellBase)
        cell = prepared_cell(module, specs, split_gates=split_gates)
        return cls(kind_of(module), cell, module.input_size, module.hidden_size, bias=module.bias)


class ConvertedCell(SingleCell, ConvertedModule):
    """A q-dq cell with folded integer weights."""

    def leaf_call_from_graph(self, layout: CallLayout, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        program = self.cell.program() if isinstance(self.cell, ConvertedCellGraphModule) else None
        if program is None or not self.runs_on_integers():
            return self.leaf_call(*args, **kwargs)
        args_grids, kwargs_grids = grids_of_call(layout)
        grid = args_grids[0] if args_grids else kwargs_grids["input"]
        columns = column_grids(grid, self.input_size, rank=2)

        def run_one_step(x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
            return run_native_direction(self.cell, program, x[None], states, columns, backward=False)[1]

        return self._call(run_one_step, *args, **kwargs)

    @classmethod
    def with_converted_cells(cls, other: SingleCell) -> Self:
        cell = reference_cell(copy.deepcopy(other.cell))
        return cls(other.kind, cell, other.input_size, other.hidden_size, bias=other.bias)

    def leaf_output_grids(self, results: list[Tensor]) -> tuple[Grid | None, ...]:
        return converted_grids(self.cell)


def fake_cell(cell: nn.RNNCellBase, path: str) -> FakeCall:
    """Shapes of the result of ``cell``, which stands at ``path``."""
    kind = kind_of(cell)

    def fake(input: Tensor, hx: Any = None) -> Any:
        check_cell_call(kind, path, cell.input_size, cell.hidden_size, input, hx)
        shape = (*input.shape[:-1], cell.hidden_size)
        return as_given(tuple(input.new_empty(shape) for _ in kind.states))

    return fake


def check_cell_call(
    kind: CellKind, path: str, input_size: int, hidden_size: int, input: Any, hx: Any
) -> tuple[Tensor, ...] | None:
    """The states in ``hx``; refuses what the float cell refuses, naming ``path``."""
    if not isinstance(input, Tensor) or input.dim() not in (1, 2) or input.shape[-1] != input_size:
        raise CustomModuleError.call_failed(
            path, f"the input must be (batch, {input_size}) or ({input_size},)"
        )
    if hx is None:
        return None
    states = check_state_count(kind, path, hx)
    expected = (*input.shape[:-1], hidden_size)
    for state, value in zip(kind.states, states, strict=True):
        if not isinstance(value, Tensor) or tuple(value.shape) != expected:
            raise CustomModuleError.call_failed(
                path, f"{state.name} must have shape {shown(expected)}, got {_shape(value)}"
            )
    return states


def _shape(state: Any) -> str:
    return str(shown(state.shape)) if isinstance(state, Tensor) else type(state).__name__
