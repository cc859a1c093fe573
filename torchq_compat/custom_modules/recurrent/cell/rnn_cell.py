"""The float RNN cells, tanh and ReLU. Formula: torch.nn.RNN's documentation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchq_compat.custom_modules.recurrent.cell.float_cell import Add, FloatCell

__all__ = ["ReLURNNCellFloat", "TanhRNNCellFloat"]


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

    def forward(self, x: Tensor, hx: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Run one step: ``x`` (B, I), ``hx`` (B, H) -> ``(hy,)`` (B, H)."""
        return self.step(self.project(x), hx)

    def step(self, projected: list[Tensor], hx: Tensor) -> tuple[Tensor, ...]:
        return (self.hy(self.gates(projected[0], self.hgates(hx))),)


class ReLURNNCellFloat(FloatCell):
    """One time step; see ``FloatCell`` for the arguments. There are no gates to split."""

    def __init__(self, weights: dict[str, Tensor], *, split_gates: bool) -> None:
        super().__init__(weights, split_gates=split_gates)
        self.hy = AddReLU()

    def forward(self, x: Tensor, hx: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Run one step: ``x`` (B, I), ``hx`` (B, H) -> ``(hy,)`` (B, H)."""
        return self.step(self.project(x), hx)

    def step(self, projected: list[Tensor], hx: Tensor) -> tuple[Tensor, ...]:
        return (self.hy(projected[0], self.hgates(hx)),)
