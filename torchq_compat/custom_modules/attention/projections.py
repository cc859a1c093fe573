"""The quantized parts of attention, which FX observes in ``torch.ao.nn.quantizable.MultiheadAttention``.

They are the projections into queries, keys and values, the output projection, and the returned weights. As in
FX, scores, softmax and the weighted sum are computed in floats.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchq_compat.custom_modules.parts.own_linear import own_linear
from torchq_compat.custom_modules.parts.part import ObservedValue, Part, PartKind

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


class ProjectIn(nn.Module):
    """Input projections: (L, N, E), (S, N, kdim), (S, N, vdim) -> (L, N, E), (S, N, E), (S, N, E)."""

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
        # The two lengths differ from each other and from the batch, so that export does not make them equal.
        return (
            torch.zeros(3, 2, attention.embed_dim, device=device),
            torch.zeros(4, 2, attention.kdim, device=device),
            torch.zeros(4, 2, attention.vdim, device=device),
        )


class ProjectOut(nn.Module):
    """The output projection: (L, N, E) -> (L, N, E)."""

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        self.quant_attn_output = ObservedValue()
        self.out_proj = own_linear(attention.out_proj.weight, attention.out_proj.bias)

    def forward(self, attended: Tensor) -> tuple[Tensor, ...]:
        return (self.out_proj(self.quant_attn_output(attended)),)


class ReturnedWeights(nn.Module):
    """The returned weights, (N, L, S) or (N, H, L, S) flattened to one dimension -> the same, observed."""

    def __init__(self) -> None:
        super().__init__()
        self.quant_attn_output_weights = ObservedValue()

    def forward(self, weights: Tensor) -> tuple[Tensor, ...]:
        return (self.quant_attn_output_weights(weights),)


def _in_weights(attention: nn.MultiheadAttention) -> tuple[Tensor, ...]:
    if attention.in_proj_weight is not None:
        return attention.in_proj_weight.chunk(3)
    return attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight
