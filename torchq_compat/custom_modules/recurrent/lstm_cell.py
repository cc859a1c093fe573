"""The float LSTM cell, written so that every part is a module with the part's name.

torch.export records the module path of every node, so a part is found in the exported cell by name.
Formula: torch.nn.LSTM's documentation; ``h' = W_hr h'`` with a projection.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchq_compat.custom_modules.recurrent.parts import GATES

__all__ = ["LSTMCellFloat"]


class Add(nn.Module):
    """``a + b``, as a module, so that it has a path."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b


class Mul(nn.Module):
    """``a * b``, as a module, so that it has a path."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b


class LSTMCellFloat(nn.Module):
    """One time step.

    Args:
        weights: ``weight_ih`` (4H, I), ``weight_hh`` (4H, P), and optionally ``bias_ih`` (4H,),
            ``bias_hh`` (4H,), ``weight_hr`` (P, H); gates stacked in the order of ``GATES``.
        split_gates: one projection pair for each gate instead of one four times as wide.
    """

    def __init__(self, weights: dict[str, Tensor], *, split_gates: bool) -> None:
        super().__init__()
        self.split_gates = split_gates
        self.igates = _projection(weights["weight_ih"], weights.get("bias_ih"), split_gates)
        self.hgates = _projection(weights["weight_hh"], weights.get("bias_hh"), split_gates)
        self.gates: nn.Module = nn.ModuleDict({gate: Add() for gate in GATES}) if split_gates else Add()
        self.input_gate = nn.Sigmoid()
        self.forget_gate = nn.Sigmoid()
        self.cell_gate = nn.Tanh()
        self.output_gate = nn.Sigmoid()
        self.fgate_cx = Mul()
        self.igate_cgate = Mul()
        self.fgate_cx_igate_cgate = Add()
        self.tanh_cy = nn.Tanh()
        self.ogate_cy = Mul()
        self.projection = _linear(weights["weight_hr"], None) if "weight_hr" in weights else None

    def forward(self, x: Tensor, hx: Tensor, cx: Tensor) -> tuple[Tensor, Tensor]:
        """``x`` (B, I), ``hx`` (B, P), ``cx`` (B, H) -> ``hy`` (B, P), ``cy`` (B, H)."""
        i, f, g, o = self._gate_inputs(x, hx)
        f_cx = self.fgate_cx(self.forget_gate(f), cx)
        i_g = self.igate_cgate(self.input_gate(i), self.cell_gate(g))
        cy = self.fgate_cx_igate_cgate(f_cx, i_g)
        hy = self.ogate_cy(self.output_gate(o), self.tanh_cy(cy))
        return (hy if self.projection is None else self.projection(hy)), cy

    def _gate_inputs(self, x: Tensor, hx: Tensor) -> list[Tensor]:
        if not self.split_gates:
            return list(self.gates(self.igates(x), self.hgates(hx)).chunk(4, 1))
        return [
            self.gates.get_submodule(gate)(
                self.igates.get_submodule(gate)(x), self.hgates.get_submodule(gate)(hx)
            )
            for gate in GATES
        ]


def _projection(weight: Tensor, bias: Tensor | None, split_gates: bool) -> nn.Module:
    if not split_gates:
        return _linear(weight, bias)
    biases = bias.chunk(4) if bias is not None else (None,) * 4
    return nn.ModuleDict(
        {gate: _linear(w, b) for gate, w, b in zip(GATES, weight.chunk(4), biases, strict=True)}
    )


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A float32 Linear that owns a copy of the values: the float module's parameters stay its own."""
    out_features, in_features = weight.shape
    linear = nn.Linear(in_features, out_features, bias=bias is not None, device="meta")
    linear.weight = _own_parameter(weight)
    if bias is not None:
        linear.bias = _own_parameter(bias)
    return linear


def _own_parameter(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values.detach().float().clone(), requires_grad=values.requires_grad)


def example_inputs(cell: LSTMCellFloat, device: torch.device) -> tuple[Tensor, ...]:
    """Zeros of the right widths with a batch of 2, to export the cell with."""
    igates = next(m for m in cell.igates.modules() if isinstance(m, nn.Linear))
    hgates = next(m for m in cell.hgates.modules() if isinstance(m, nn.Linear))
    widths = (igates.in_features, hgates.in_features, hgates.out_features // (1 if cell.split_gates else 4))
    return tuple(torch.zeros(2, width, device=device) for width in widths)
