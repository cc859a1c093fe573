"""Weights in the forms in which FX's converted models save them, as floats with their qparams.

The forms are quantized tensors, pairs of a linear's weight and bias, and packed objects of such pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchq_compat.support.quantized_tensors import (
    KERNELS,
    as_float,
    channel_qparams,
    has_float_qparams,
    is_per_channel,
    is_quantized,
    qparams_of,
)

__all__ = ["FxWeight", "is_packed", "unpacked_cell", "unpacked_pair", "weight_of_tensor"]


@dataclass(frozen=True)
class FxWeight:
    """A weight with the values that its integers represent.

    Attributes:
        values: float32, the dequantized integers.
        scale: of shape (n,), one or one for each channel; None for half precision.
        zero_point: like ``scale``; floats for embeddings.
    """

    values: Tensor
    scale: Tensor | None = None
    zero_point: Tensor | None = None


def is_packed(value: object) -> bool:
    """Return whether ``value`` is one of torch's packed objects."""
    return isinstance(value, torch.ScriptObject)


def weight_of_tensor(tensor: Tensor) -> FxWeight:
    """Return ``tensor``, quantized or in half precision, as an FxWeight."""
    if not is_quantized(tensor):
        return FxWeight(tensor.detach().float())
    values = as_float(tensor).float()
    if is_per_channel(tensor) or has_float_qparams(tensor):
        # embedding_bag_unpack returns a tensor whose scales are in the memory of the packed object.
        scales, zero_points = channel_qparams(tensor)
        return FxWeight(values, scales.float().clone(), zero_points.clone())
    scale, zero_point = qparams_of(tensor)
    return FxWeight(values, torch.tensor([scale]), torch.tensor([zero_point]))


def unpacked_pair(packed: Any) -> tuple[FxWeight, Tensor | None]:
    """Return (weight, bias) of a packed linear, convolution or embedding.

    Raises:
        ValueError: ``packed`` is another kind of object.
    """
    kind = _kind(packed)
    if "Embedding" in kind:
        return weight_of_tensor(KERNELS.embedding_bag_unpack(packed)), None
    if "Linear" in kind:
        weight, bias = packed.__getstate__()[0]
    elif "Conv" in kind:
        weight, bias = packed.unpack()
    else:
        raise ValueError(f"{kind} is no packed weight")
    return weight_of_tensor(weight), bias


def unpacked_cell(packed: Any) -> dict[str, FxWeight | Tensor]:
    """Return "weight_ih", "bias_ih", "weight_hh" and "bias_hh" of one direction of one layer of a dynamic
    LSTM or GRU.

    Raises:
        ValueError: ``packed`` is another kind of object.
    """
    if "CellParams" not in _kind(packed):
        raise ValueError(f"{_kind(packed)} is no packed cell")
    return dict(_cell_entries(packed.__getstate__()[0]))


def _cell_entries(state: Any) -> Iterator[tuple[str, FxWeight | Tensor]]:
    _, biases, _, _, packed = state
    for index, (which, linear) in enumerate(zip(("ih", "hh"), packed, strict=True)):
        weight, bias = unpacked_pair(linear)
        yield f"weight_{which}", weight
        # Quantized cells store the biases beside the linears.
        bias = biases[index] if biases else bias
        if bias is not None:
            yield f"bias_{which}", bias


def _kind(packed: Any) -> str:
    return str(packed._type())
