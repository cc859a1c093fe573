"""The float cells of torch.nn's recurrences: their kinds, parts and formulas, one time step each."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from torchq_compat.modules.parts import Part, PartKind, own_linear

# The one table of the parts of the recurrent cells: their names, kinds and groups.
#
# A part is an op of the cell whose output is observed. Its name is the path of the op's module inside the
# cell; for LSTM the name in FX's quantizable cell, so that ``layer_fw.cell.fgate_cx`` means the same in
# both. The observers of the parts of one ``group`` come from one constructor; every part still has its own
# observer.


#: The order of the gates in torch.nn's stacked weights and in split gates.
LSTM_GATES = ("input", "forget", "cell", "output")
GRU_GATES = ("reset", "update", "new")


#: LSTM, in the order of computation. FX observes the first seven that are not activations.
LSTM_PARTS = (
    Part("igates", PartKind.LINEAR, "igates", "W_ih x + b_ih", covers=LSTM_GATES),
    Part("hgates", PartKind.LINEAR, "hgates", "W_hh h + b_hh", covers=LSTM_GATES),
    Part("gates", PartKind.ADD, "linear_output", "igates + hgates", covers=LSTM_GATES),
    Part("input_gate", PartKind.SIGMOID, "sigmoid", "i = sigmoid(gates[0])", "sigmoid_input"),
    Part("forget_gate", PartKind.SIGMOID, "sigmoid", "f = sigmoid(gates[1])", "sigmoid_input"),
    Part("cell_gate", PartKind.TANH, "tanh", "g = tanh(gates[2])", "tanh_input"),
    Part("output_gate", PartKind.SIGMOID, "sigmoid", "o = sigmoid(gates[3])", "sigmoid_input"),
    Part("fgate_cx", PartKind.MUL, "cell_state", "f * c"),
    Part("igate_cgate", PartKind.MUL, "cell_state", "i * g"),
    Part("fgate_cx_igate_cgate", PartKind.ADD, "cell_state", "c' = f * c + i * g"),
    Part("tanh_cy", PartKind.TANH, "tanh_cell_state", "tanh(c')"),
    Part("ogate_cy", PartKind.MUL, "hidden_state", "h' = o * tanh(c')"),
    Part("projection", PartKind.LINEAR, "hidden_state", "h' = W_hr (o * tanh(c'))"),
)

#: GRU with PyTorch's reset gate, which is applied after the hidden projection.
GRU_PARTS = (
    Part("igates", PartKind.LINEAR, "igates", "W_ih x + b_ih", covers=GRU_GATES),
    Part("hgates", PartKind.LINEAR, "hgates", "W_hh h + b_hh", covers=GRU_GATES),
    Part("gates", PartKind.ADD, "linear_output", "igates[:2] + hgates[:2]", covers=GRU_GATES[:2]),
    Part("reset_gate", PartKind.SIGMOID, "sigmoid", "r = sigmoid(gates[0])", "sigmoid_input"),
    Part("update_gate", PartKind.SIGMOID, "sigmoid", "z = sigmoid(gates[1])", "sigmoid_input"),
    Part("rgate_hgate", PartKind.MUL, "linear_output", "r * hgates[2]"),
    Part("igate_rgate_hgate", PartKind.ADD, "linear_output", "igates[2] + r * hgates[2]"),
    Part("new_gate", PartKind.TANH, "tanh", "n = tanh(igates[2] + r * hgates[2])", "tanh_input"),
    Part("keep_gate", PartKind.COMPLEMENT, "sigmoid", "1 - z"),
    Part("kgate_ngate", PartKind.MUL, "hidden_product", "(1 - z) * n"),
    Part("zgate_hx", PartKind.MUL, "hidden_product", "z * h"),
    Part("hy", PartKind.ADD, "hidden_state", "h' = (1 - z) * n + z * h"),
)

RNN_PROJECTIONS = (
    Part("igates", PartKind.LINEAR, "igates", "W_ih x + b_ih"),
    Part("hgates", PartKind.LINEAR, "hgates", "W_hh h + b_hh"),
)
RNN_TANH_PARTS = (
    *RNN_PROJECTIONS,
    Part("gates", PartKind.ADD, "linear_output", "igates + hgates"),
    Part("hy", PartKind.TANH, "hidden_state", "h' = tanh(igates + hgates)", "tanh_input"),
)
#: Every backend treats add and ReLU as one op: nothing is observed between them.
RNN_RELU_PARTS = (
    *RNN_PROJECTIONS,
    Part("hy", PartKind.RELU, "hidden_state", "h' = relu(igates + hgates)"),
)


# Building blocks of the float cells: each op is a module with the name of its part.
#
# torch.export records the module path of every node, so a part is found in the exported cell by name.


class Add(nn.Module):
    """``a + b``, as a module, so that it has a path."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b


class Mul(nn.Module):
    """``a * b``, as a module, so that it has a path."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b


class GateModules(nn.Module):
    """One module for each gate. Not a ModuleDict, whose method ``update`` clashes with the GRU's gate."""

    def __init__(self, by_gate: dict[str, nn.Module]) -> None:
        super().__init__()
        for gate, module in by_gate.items():
            self.add_module(gate, module)


class FloatCell(nn.Module, ABC):
    """One time step of a recurrent module, in float32.

    Args:
        weights: weights by their names in torch.nn: ``weight_ih`` (G*H, I), ``weight_hh`` (G*H, P), and
            optionally ``bias_ih`` (G*H,), ``bias_hh`` (G*H,), ``weight_hr`` (P, H), for G stacked gates.
        split_gates: one projection pair for each gate instead of one pair G times as wide.
    """

    #: Names of the stacked gates; empty for a cell without gates.
    gate_names: tuple[str, ...] = ()

    def __init__(self, weights: dict[str, Tensor], *, split_gates: bool) -> None:
        super().__init__()
        self.split_gates = split_gates and bool(self.gate_names)
        self.input_size = weights["weight_ih"].shape[1]
        self.output_size = weights["weight_hh"].shape[1]
        self.hidden_size = weights["weight_hh"].shape[0] // max(1, len(self.gate_names))
        self.igates = self._projection(weights["weight_ih"], weights.get("bias_ih"))
        self.hgates = self._projection(weights["weight_hh"], weights.get("bias_hh"))

    def forward(self, x: Tensor, hx: Tensor, cx: Tensor | None = None) -> tuple[Tensor, ...]:
        """Run one step: ``x`` (B, I), ``hx`` (B, P), for LSTM ``cx`` (B, H) -> the new states."""
        states: tuple[Tensor, ...] = (hx,) if cx is None else (hx, cx)
        return self.step(self.project(x), *states)

    def project(self, x: Tensor) -> list[Tensor]:
        """Return ``W_ih x + b_ih``, one tensor per gate if gates are split, else one for all gates; ``x`` may
        have any leading dimensions."""
        return self._project(self.igates, x)

    @abstractmethod
    def step(self, projected: list[Tensor], hx: Tensor) -> tuple[Tensor, ...]:
        """Return the new states, given ``project(x)`` for ``x`` (B, I) and the states."""

    @property
    def state_widths(self) -> tuple[int, ...]:
        """The width of every state, the hidden state first."""
        return (self.output_size,)

    def example_inputs(self) -> tuple[Tensor, ...]:
        """Return zeros of the right widths with a batch of 2, to export the cell with."""
        device = next(self.parameters()).device
        return tuple(torch.zeros(2, width, device=device) for width in (self.input_size, *self.state_widths))

    def _projection(self, weight: Tensor, bias: Tensor | None) -> nn.Module:
        if not self.split_gates:
            return own_linear(weight, bias)
        count = len(self.gate_names)
        biases = bias.chunk(count) if bias is not None else (None,) * count
        return GateModules(
            {
                gate: own_linear(w, b)
                for gate, w, b in zip(self.gate_names, weight.chunk(count), biases, strict=True)
            }
        )

    def _project(self, projection: nn.Module, x: Tensor) -> list[Tensor]:
        if self.split_gates:
            return [projection.get_submodule(gate)(x) for gate in self.gate_names]
        return [projection(x)]


def split_or_whole(gates: tuple[str, ...], *, split_gates: bool) -> nn.Module:
    """Return the module that adds two projections: one ``Add``, or one for each of ``gates``."""
    return GateModules({gate: Add() for gate in gates}) if split_gates else Add()


# The float GRU cell. Formula: torch.nn.GRU's documentation, where the reset gate acts on the hidden
# projection ``W_hn h + b_hn``, not on ``h`` as in the original paper.


class Complement(nn.Module):
    """``1 - a``, as a module, so that it has a path."""

    def forward(self, a: Tensor) -> Tensor:
        return 1 - a


class GRUCellFloat(FloatCell):
    """One time step; see ``FloatCell`` for the arguments."""

    gate_names = GRU_GATES

    def __init__(self, weights: dict[str, Tensor], *, split_gates: bool) -> None:
        super().__init__(weights, split_gates=split_gates)
        self.gates = split_or_whole(GRU_GATES[:2], split_gates=split_gates)
        self.reset_gate = nn.Sigmoid()
        self.update_gate = nn.Sigmoid()
        self.rgate_hgate = Mul()
        self.igate_rgate_hgate = Add()
        self.new_gate = nn.Tanh()
        self.keep_gate = Complement()
        self.kgate_ngate = Mul()
        self.zgate_hx = Mul()
        self.hy = Add()

    def step(self, projected: list[Tensor], hx: Tensor) -> tuple[Tensor, ...]:
        r, z, i_n, h_n = self._gate_inputs(projected, hx)
        reset, update = self.reset_gate(r), self.update_gate(z)
        n = self.new_gate(self.igate_rgate_hgate(i_n, self.rgate_hgate(reset, h_n)))
        return (self.hy(self.kgate_ngate(self.keep_gate(update), n), self.zgate_hx(update, hx)),)

    def _gate_inputs(self, projected: list[Tensor], hx: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the summed projections of the reset and the update gate, and both projections of the new
        gate."""
        hidden = self._project(self.hgates, hx)
        if self.split_gates:
            (i_r, i_z, i_n), (h_r, h_z, h_n) = projected, hidden
            reset, update = (self.gates.get_submodule(gate) for gate in GRU_GATES[:2])
            return reset(i_r, h_r), update(i_z, h_z), i_n, h_n
        sizes = [2 * self.hidden_size, self.hidden_size]
        i_rz, i_n = torch.split(projected[0], sizes, 1)
        h_rz, h_n = torch.split(hidden[0], sizes, 1)
        r, z = self.gates(i_rz, h_rz).chunk(2, 1)
        return r, z, i_n, h_n


# The float LSTM cell. Formula: torch.nn.LSTM's documentation; ``h' = W_hr h'`` with a projection.


class LSTMCellFloat(FloatCell):
    """One time step; see ``FloatCell`` for the arguments."""

    gate_names = LSTM_GATES

    def __init__(self, weights: dict[str, Tensor], *, split_gates: bool) -> None:
        super().__init__(weights, split_gates=split_gates)
        self.gates = split_or_whole(LSTM_GATES, split_gates=split_gates)
        self.input_gate = nn.Sigmoid()
        self.forget_gate = nn.Sigmoid()
        self.cell_gate = nn.Tanh()
        self.output_gate = nn.Sigmoid()
        self.fgate_cx = Mul()
        self.igate_cgate = Mul()
        self.fgate_cx_igate_cgate = Add()
        self.tanh_cy = nn.Tanh()
        self.ogate_cy = Mul()
        self.projection = own_linear(weights["weight_hr"], None) if "weight_hr" in weights else None

    @property
    def state_widths(self) -> tuple[int, ...]:
        """(P, H)."""
        return self.output_size, self.hidden_size

    def step(  # type: ignore[override]
        self, projected: list[Tensor], hx: Tensor, cx: Tensor
    ) -> tuple[Tensor, Tensor]:
        i, f, g, o = self._gate_inputs(projected, hx)
        f_cx = self.fgate_cx(self.forget_gate(f), cx)
        i_g = self.igate_cgate(self.input_gate(i), self.cell_gate(g))
        cy = self.fgate_cx_igate_cgate(f_cx, i_g)
        hy = self.ogate_cy(self.output_gate(o), self.tanh_cy(cy))
        return (hy if self.projection is None else self.projection(hy)), cy

    def _gate_inputs(self, projected: list[Tensor], hx: Tensor) -> list[Tensor]:
        hidden = self._project(self.hgates, hx)
        if not self.split_gates:
            return list(self.gates(projected[0], hidden[0]).chunk(4, 1))
        pairs = zip(projected, hidden, strict=True)
        return [self.gates.get_submodule(gate)(*pair) for gate, pair in zip(LSTM_GATES, pairs, strict=True)]


# The float RNN cells, tanh and ReLU. Formula: torch.nn.RNN's documentation.


class AddReLU(nn.Module):
    """``relu(a + b)``, as a module: one part."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.relu(a + b)


class TanhRNNCellFloat(FloatCell):
    """One time step; see ``FloatCell`` for the arguments. There are no gates to split."""

    def __init__(self, weights: dict[str, Tensor], *, split_gates: bool) -> None:
        super().__init__(weights, split_gates=split_gates)
        self.gates = Add()
        self.hy = nn.Tanh()

    def step(self, projected: list[Tensor], hx: Tensor) -> tuple[Tensor, ...]:
        return (self.hy(self.gates(projected[0], self.hgates(hx))),)


class ReLURNNCellFloat(FloatCell):
    """One time step; see ``FloatCell`` for the arguments. There are no gates to split."""

    def __init__(self, weights: dict[str, Tensor], *, split_gates: bool) -> None:
        super().__init__(weights, split_gates=split_gates)
        self.hy = AddReLU()

    def step(self, projected: list[Tensor], hx: Tensor) -> tuple[Tensor, ...]:
        return (self.hy(projected[0], self.hgates(hx)),)


# The kinds of recurrence in torch.nn: what a cell computes, and which states it carries.


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
        """Return the parts of one cell, in the order of computation; with ``split_gates``, a projection pair
        and an add for each gate."""
        parts: list[Part] = []
        for part in self.table:
            if part.name == "projection" and not projected:
                continue
            if split_gates and part.covers:
                parts.extend(replace(part, name=f"{part.name}.{gate}", covers=()) for gate in part.covers)
            else:
                parts.append(part)
        return tuple(parts)

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
