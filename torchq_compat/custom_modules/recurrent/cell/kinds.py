"""The kinds of recurrence in torch.nn: what a cell computes, and which states it carries."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from torchq_compat.custom_modules.parts.part import Part
from torchq_compat.custom_modules.recurrent.cell.cell_parts import (
    GRU_PARTS,
    LSTM_PARTS,
    RNN_RELU_PARTS,
    RNN_TANH_PARTS,
    parts_of,
)
from torchq_compat.custom_modules.recurrent.cell.float_cell import FloatCell
from torchq_compat.custom_modules.recurrent.cell.gru_cell import GRUCellFloat
from torchq_compat.custom_modules.recurrent.cell.lstm_cell import LSTMCellFloat
from torchq_compat.custom_modules.recurrent.cell.rnn_cell import ReLURNNCellFloat, TanhRNNCellFloat

__all__ = ["CellKind", "CellState", "kind_of"]


@dataclass(frozen=True)
class CellState:
    """One state: its name in messages, and the group of the parts whose dtype it has."""

    name: str
    group: str


HIDDEN = CellState("h", "hidden_state")
CELL = CellState("c", "cell_state")


@dataclass(frozen=True)
class CellKind:
    """A kind of recurrence.

    Attributes:
        name: the name for messages.
        float_cell: the module of one time step in floats.
        table: the parts of the cell.
        states: the states carried from step to step, the hidden state first.
        options: the constructor arguments that select this kind in torch.nn.
    """

    name: str
    float_cell: type[FloatCell]
    table: tuple[Part, ...]
    states: tuple[CellState, ...]
    options: tuple[tuple[str, str], ...] = ()

    def parts(self, *, split_gates: bool, projected: bool = False) -> tuple[Part, ...]:
        """Return the parts of one cell, in the order of computation."""
        return parts_of(self.table, split_gates=split_gates, projected=projected)

    @property
    def groups(self) -> frozenset[str]:
        """The groups of parts that a constructor can be given for."""
        groups = {part.group for part in self.table} | {part.input_group for part in self.table}
        return frozenset(group for group in groups if group is not None) | {"weight"}


LSTM = CellKind("LSTM", LSTMCellFloat, LSTM_PARTS, (HIDDEN, CELL))
GRU = CellKind("GRU", GRUCellFloat, GRU_PARTS, (HIDDEN,))
RNN_TANH = CellKind("RNN", TanhRNNCellFloat, RNN_TANH_PARTS, (HIDDEN,))
RNN_RELU = CellKind("RNN with ReLU", ReLURNNCellFloat, RNN_RELU_PARTS, (HIDDEN,), (("nonlinearity", "relu"),))


def kind_of(module: nn.Module) -> CellKind:
    """Return the kind of a recurrent module or cell of torch.nn."""
    if isinstance(module, (nn.LSTM, nn.LSTMCell)):
        return LSTM
    if isinstance(module, (nn.GRU, nn.GRUCell)):
        return GRU
    assert isinstance(module, (nn.RNN, nn.RNNCell))
    return RNN_RELU if module.nonlinearity == "relu" else RNN_TANH
