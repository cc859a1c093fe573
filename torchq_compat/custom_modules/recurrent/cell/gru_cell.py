"""The float GRU cell. Formula: torch.nn.GRU's documentation, where the reset gate acts on the hidden
projection ``W_hn h + b_hn``, not on ``h`` as in the original paper."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchq_compat.custom_modules.recurrent.cell.cell_parts import GRU_GATES
from torchq_compat.custom_modules.recurrent.cell.float_cell import Add, FloatCell, Mul, split_or_whole

__all__ = ["GRUCellFloat"]


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

    def forward(self, x: Tensor, hx: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Run one step: ``x`` (B, I), ``hx`` (B, H) -> ``(hy,)`` (B, H)."""
        return self.step(self.project(x), hx)

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
