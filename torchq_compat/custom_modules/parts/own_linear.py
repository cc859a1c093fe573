"""Float32 copies of a float module's parameters, which leave the originals unchanged."""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["own_linear", "own_parameter"]


def own_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return a float32 Linear with copies of ``weight`` and ``bias``."""
    out_features, in_features = weight.shape
    linear = nn.Linear(in_features, out_features, bias=bias is not None, device="meta")
    linear.weight = own_parameter(weight)
    if bias is not None:
        linear.bias = own_parameter(bias)
    return linear


def own_parameter(values: Tensor) -> nn.Parameter:
    """Return a float32 parameter with a copy of ``values``."""
    return nn.Parameter(values.detach().float().clone(), requires_grad=values.requires_grad)
