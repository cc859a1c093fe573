"""The observed and the converted LSTMCell: one prepared or converted cell, called once.

Legacy: ``torch.ao.nn.quantizable.LSTMCell``, which FX cannot map because its result is a tuple.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torchq_compat.custom_modules.layouts import CallLayout
from torchq_compat.custom_modules.leaf_module import LeafModule
from torchq_compat.custom_modules.leaf_op import FakeCall
from torchq_compat.custom_modules.recurrent.cell_graph import (
    CellGraphModule,
    converted_grids,
    reference_cell,
)
from torchq_compat.custom_modules.recurrent.constructors import CellSpecs
from torchq_compat.custom_modules.recurrent.contract import shown
from torchq_compat.errors import CustomModuleError
from torchq_compat.specs.grids import Grid

__all__ = ["ConvertedLSTMCell", "LSTMCellCall", "ObservedLSTMCell", "fake_lstm_cell"]

State = tuple[Tensor, Tensor]


class LSTMCellCall(LeafModule):
    """What the observed and the converted cell have in common. ``cell`` computes in float32."""

    specs: CellSpecs
    split_gates: bool
    qconfig: Any

    def __init__(self, cell: CellGraphModule, input_size: int, hidden_size: int, *, bias: bool) -> None:
        nn.Module.__init__(self)
        self.cell = cell
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.bias = bias
        self.module_path = ""
        self.layouts: list[CallLayout] = []

    def cells(self) -> Iterator[tuple[str, CellGraphModule]]:
        """(path inside the module, cell): the one."""
        yield "cell", self.cell

    def call(self, input: Tensor, hx: Any = None) -> State:
        """As ``torch.nn.LSTMCell``: input (B, I) or (I,), state (h, c) of (B, H) or (H,), or None.

        Raises:
            CustomModuleError: arguments ``torch.nn.LSTMCell`` would refuse.
        """
        check_cell_call(self.module_path, self.input_size, self.hidden_size, input, hx)
        batched = input.dim() == 2
        x = (input if batched else input.unsqueeze(0)).float()
        if hx is None:
            h, c = self.cell.initial_state((self.hidden_size, self.hidden_size), x)
        else:
            h, c = (state.float() if batched else state.float().unsqueeze(0) for state in hx)
        h, c = (state.to(input.dtype) for state in self.cell(x, h, c))
        return (h, c) if batched else (h.squeeze(0), c.squeeze(0))


class ObservedLSTMCell(LSTMCellCall, torch.ao.nn.quantizable.LSTMCell):
    """An LSTMCell whose parts are observed, or fake-quantized, one by one."""


class ConvertedLSTMCell(LSTMCellCall):
    """A q-dq LSTMCell with folded integer weights."""

    @classmethod
    def from_observed(cls, other: ObservedLSTMCell) -> ConvertedLSTMCell:
        """Convert the cell of ``other``, which is left as it is."""
        converted = cls(
            reference_cell(copy.deepcopy(other.cell)), other.input_size, other.hidden_size, bias=other.bias
        )
        converted.specs, converted.split_gates = other.specs, other.split_gates
        converted.module_path = other.module_path
        converted.layouts = list(other.layouts)
        return converted

    def output_grids(self, results: list[Tensor]) -> tuple[Grid | None, ...]:
        return converted_grids(self.cell)


def fake_lstm_cell(cell: nn.LSTMCell, path: str) -> FakeCall:
    """Shapes of the result of ``cell``, which stands at ``path``."""

    def fake(input: Tensor, hx: Any = None) -> State:
        check_cell_call(path, cell.input_size, cell.hidden_size, input, hx)
        shape = (*input.shape[:-1], cell.hidden_size)
        return input.new_empty(shape), input.new_empty(shape)

    return fake


def check_cell_call(path: str, input_size: int, hidden_size: int, input: Any, hx: Any) -> None:
    """Refuse what torch.nn.LSTMCell refuses, naming ``path``."""
    if not isinstance(input, Tensor) or input.dim() not in (1, 2) or input.shape[-1] != input_size:
        raise CustomModuleError.call_failed(
            path, f"the input must be (batch, {input_size}) or ({input_size},)"
        )
    if hx is None:
        return
    if not isinstance(hx, (tuple, list)) or len(hx) != 2:
        raise CustomModuleError.call_failed(path, "the state must be a pair (h, c)")
    for name, state in zip(("h", "c"), hx, strict=True):
        if not isinstance(state, Tensor) or tuple(state.shape) != (*input.shape[:-1], hidden_size):
            raise CustomModuleError.call_failed(
                path,
                f"{name} must have shape {shown((*input.shape[:-1], hidden_size))}, got {_shape(state)}",
            )


def _shape(state: Any) -> str:
    return str(shown(state.shape)) if isinstance(state, Tensor) else type(state).__name__
