"""The float LSTM cell. Formula: torch.nn.LSTM's documentation; ``h' = W_hr h'`` with a projection."""

from __future__ import annotations

from torch import Tensor, nn

from torchq_compat.custom_modules.parts.own_linear import own_linear
from torchq_compat.custom_modules.recurrent.cell.cell_parts import LSTM_GATES
from torchq_compat.custom_modules.recurrent.cell.float_cell import Add, FloatCell, Mul, split_or_whole

__all__ = ["LSTMCellFloat"]


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

    def forward(self, x: Tensor, hx: Tensor, cx: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Run one step: ``x`` (B, I), ``hx`` (B, P), ``cx`` (B, H) -> ``hy`` (B, P), ``cy`` (B, H)."""
        return self.step(self.project(x), hx, cx)

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
