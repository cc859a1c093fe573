"""The quantized parts of attention: what FX observes in ``torch.ao.nn.quantizable.MultiheadAttention``.

The projections into queries, keys and values, the one out, and the returned weights. Scores, softmax and the
weighted sum are computed in floats, there as here.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchq_compat.custom_modules.parts.own_linear import own_linear
from torchq_compat.custom_modules.parts.part import Part, PartKind

__all__ = ["OUT_PARTS", "PROJECTION_PARTS", "WEIGHTS_PARTS", "ProjectIn", "ProjectOut", "ReturnedWeights"]

PROJECTION_PARTS = (
    Part("linear_Q", PartKind.LINEAR, "linear_output", "W_q query + b_q"),
    Part("linear_K", PartKind.LINEAR, "linear_output", "W_k key + b_k"),
    Part("linear_V", PartKind.LINEAR, "linear_output", "W_v value + b_v"),
)
OUT_PARTS = (
    Part("quant_attn_output", PartKind.IDENTITY, "attention", "softmax(q k / sqrt(d)) v"),
    Part("out_proj", PartKind.LINEAR, "output", "W_o attention + b_o"),
)
WEIGHTS_PARTS = (
    Part("quant_attn_output_weights", PartKind.IDENTITY, "attention_weights", "softmax(q k / sqrt(d))"),
)


class Observed(nn.Module):
    """Its input, as a node of its own."""

    def forward(self, x: Tensor) -> Tensor:
        alias: Tensor = torch.ops.aten.alias.default(x)
        return alias


class ProjectIn(nn.Module):
    """(L, N, E), (S, N, kdim), (S, N, vdim) -> queries (L, N, E), keys and values (S, N, E)."""

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        biases: tuple[Tensor | None, ...] = (None,) * 3
        if attention.in_proj_bias is not None:
            biases = attention.in_proj_bias.chunk(3)
        self.linear_Q, self.linear_K, self.linear_V = map(own_linear, _in_weights(attention), biases)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.linear_Q(query), self.linear_K(key), self.linear_V(value)

    @staticmethod
    def example_inputs(attention: nn.MultiheadAttention) -> tuple[Tensor, ...]:
        device = attention.out_proj.weight.device
        # Different lengths, and none of them the batch: nothing may be taken to be equal.
        return (
            torch.zeros(3, 2, attention.embed_dim, device=device),
            torch.zeros(4, 2, attention.kdim, device=device),
            torch.zeros(4, 2, attention.vdim, device=device),
        )


class ProjectOut(nn.Module):
    """(L, N, E) -> (L, N, E)."""

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        self.quant_attn_output = Observed()
        self.out_proj = own_linear(attention.out_proj.weight, attention.out_proj.bias)

    def forward(self, attended: Tensor) -> tuple[Tensor, ...]:
        return (self.out_proj(self.quant_attn_output(attended)),)


class ReturnedWeights(nn.Module):
    """(N, L, S) or (N, H, L, S), flattened to one dimension -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.quant_attn_output_weights = Observed()

    def forward(self, weights: Tensor) -> tuple[Tensor, ...]:
        return (self.quant_attn_output_weights(weights),)


def _in_weights(attention: nn.MultiheadAttention) -> tuple[Tensor, ...]:
    if attention.in_proj_weight is not None:
        return attention.in_proj_weight.chunk(3)
    return attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight
