"""Building blocks of the float cells: each op is a module with the name of its part.

torch.export records the module path of every node, so a part is found in the exported cell by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from torchq_compat.custom_modules.parts.own_linear import own_linear

__all__ = ["Add", "FloatCell", "Mul", "split_or_whole"]


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

    def forward(self, x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """Run one step: ``x`` (B, I) and the states -> the new states, the hidden state (B, P) first."""
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
