"""The parts of a recurrent cell, by name, and what they share: the one table.

A part is an op of the cell whose output is observed. Its name is the path of the op's module inside the cell,
the name FX's quantizable cell gives it, so ``layer_fw.cell.fgate_cx`` means the same in both. Parts of one
``group`` take their observers from one constructor; every part still has an observer of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["GATES", "LSTM_PARTS", "Part", "PartKind", "lstm_parts"]

#: Gate order of torch.nn.LSTM's stacked weights, and of split gates.
GATES = ("input", "forget", "cell", "output")


class PartKind(Enum):
    """The operation of a part: decides its default observer and its row in a BackendConfig."""

    LINEAR = "linear"
    ADD = "add"
    MUL = "mul"
    SIGMOID = "sigmoid"
    TANH = "tanh"


@dataclass(frozen=True)
class Part:
    """One op of a cell.

    Attributes:
        name: path of the op inside the cell.
        kind: what the op is; decides its default observer.
        group: the constructor its output observer comes from.
        input_group: the constructor that observes its input apart from the producer's output, if given.
        formula: what it computes, for people.
    """

    name: str
    kind: PartKind
    group: str
    formula: str
    input_group: str | None = None


#: LSTM, in the order of computation. FX observes the first seven that are not activations.
LSTM_PARTS = (
    Part("igates", PartKind.LINEAR, "igates", "W_ih x + b_ih"),
    Part("hgates", PartKind.LINEAR, "hgates", "W_hh h + b_hh"),
    Part("gates", PartKind.ADD, "linear_output", "igates + hgates"),
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
SPLIT_BY_GATE = ("igates", "hgates", "gates")


def lstm_parts(*, split_gates: bool, projected: bool) -> tuple[Part, ...]:
    """The parts of one LSTM cell: split gates have a projection pair and an add for each gate."""
    parts: list[Part] = []
    for part in LSTM_PARTS:
        if part.name == "projection" and not projected:
            continue
        if split_gates and part.name in SPLIT_BY_GATE:
            parts.extend(Part(f"{part.name}.{gate}", part.kind, part.group, part.formula) for gate in GATES)
        else:
            parts.append(part)
    return tuple(parts)
