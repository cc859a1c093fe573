"""The one table of the parts of the recurrent cells: their names, kinds and groups.

A part is an op of the cell whose output is observed. Its name is the path of the op's module inside the cell;
for LSTM the name in FX's quantizable cell, so that ``layer_fw.cell.fgate_cx`` means the same in both. The
observers of the parts of one ``group`` come from one constructor; every part still has its own observer.
"""

from __future__ import annotations

from dataclasses import replace

from torchq_compat.custom_modules.parts.part import Part, PartKind

__all__ = [
    "GRU_GATES",
    "GRU_PARTS",
    "LSTM_GATES",
    "LSTM_PARTS",
    "RNN_RELU_PARTS",
    "RNN_TANH_PARTS",
    "parts_of",
]

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


def parts_of(table: tuple[Part, ...], *, split_gates: bool, projected: bool) -> tuple[Part, ...]:
    """Return the parts of one cell; with ``split_gates``, a projection pair and an add for each gate."""
    parts: list[Part] = []
    for part in table:
        if part.name == "projection" and not projected:
            continue
        if split_gates and part.covers:
            parts.extend(replace(part, name=f"{part.name}.{gate}", covers=()) for gate in part.covers)
        else:
            parts.append(part)
    return tuple(parts)
