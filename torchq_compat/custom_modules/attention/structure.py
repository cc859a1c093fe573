"""The calling contract of nn.MultiheadAttention: arguments, masks and shapes.

Source: the documentation of torch.nn.MultiheadAttention. Shapes are written with L target length, S source
length, N batch, E embedding, H heads.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchq_compat.errors import CustomModuleError

__all__ = ["AttentionCall", "AttentionStructure"]

SIGNATURE = inspect.signature(nn.MultiheadAttention.forward)


@dataclass(frozen=True)
class AttentionStructure:
    """The constructor arguments of a torch.nn.MultiheadAttention."""

    embed_dim: int
    num_heads: int
    dropout: float
    batch_first: bool
    kdim: int
    vdim: int
    add_zero_attn: bool

    @classmethod
    def of(cls, module: nn.MultiheadAttention) -> AttentionStructure:
        return cls(
            embed_dim=module.embed_dim,
            num_heads=module.num_heads,
            dropout=float(module.dropout),
            batch_first=module.batch_first,
            kdim=module.kdim,
            vdim=module.vdim,
            add_zero_attn=module.add_zero_attn,
        )

    @property
    def head_dim(self) -> int:
        return self.embed_dim // self.num_heads


@dataclass(frozen=True)
class AttentionCall:
    """One call, with inputs of shape (length, batch, width).

    Attributes:
        query: (L, N, E).
        key: (S, N, kdim).
        value: (S, N, vdim).
        mask: the mask added to the scores, broadcastable to (N, H, L, S), or None.
        need_weights: whether the weights are returned.
        average: whether the returned weights are averaged over the heads.
        batched: whether the caller's inputs have a batch dimension.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    need_weights: bool
    average: bool
    batched: bool

    @classmethod
    def read(cls, structure: AttentionStructure, path: str, args: Any, kwargs: Any) -> AttentionCall:
        """Return the call ``attention(*args, **kwargs)``.

        Raises:
            CustomModuleError: if nn.MultiheadAttention would refuse the arguments; names ``path``.
        """
        try:
            bound = SIGNATURE.bind(None, *args, **kwargs)
        except TypeError as cause:
            raise CustomModuleError.call_failed(path, str(cause)) from cause
        bound.apply_defaults()
        given = bound.arguments
        if given["is_causal"] and given["attn_mask"] is None:
            raise CustomModuleError.call_failed(path, "is_causal is a hint about attn_mask, which is missing")
        inputs = (given["query"], given["key"], given["value"])
        _check_inputs(structure, path, inputs)
        batched = given["query"].dim() == 3
        query, key, value = (_length_first(structure, tensor, batched) for tensor in inputs)
        masks = (given["attn_mask"], given["key_padding_mask"])
        mask = _merge_masks(structure, path, masks, query, key, batched)
        return cls(query, key, value, mask, given["need_weights"], given["average_attn_weights"], batched)

    def results(
        self, structure: AttentionStructure, output: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return ``output`` (L, N, E) and ``weights`` (N, L, S) or (N, H, L, S) in the form the caller
        expects."""
        if not self.batched:
            return output.squeeze(1), None if weights is None else weights.squeeze(0)
        return (output.transpose(0, 1) if structure.batch_first else output), weights


def _length_first(structure: AttentionStructure, tensor: Tensor, batched: bool) -> Tensor:
    if not batched:
        return tensor.unsqueeze(1)
    return tensor.transpose(0, 1) if structure.batch_first else tensor


def _check_inputs(structure: AttentionStructure, path: str, inputs: tuple[Any, ...]) -> None:
    widths = (structure.embed_dim, structure.kdim, structure.vdim)
    for name, tensor, width in zip(("query", "key", "value"), inputs, widths, strict=True):
        if not isinstance(tensor, Tensor) or tensor.is_nested:
            raise CustomModuleError.call_failed(path, f"{name} must be a dense tensor")
        if tensor.dim() not in (2, 3) or tensor.dim() != inputs[0].dim():
            raise CustomModuleError.call_failed(path, f"{name} must have 2 or 3 dimensions, as query")
        if tensor.shape[-1] != width:
            raise CustomModuleError.call_failed(path, f"the last dimension of {name} must be {width}")


def _merge_masks(
    structure: AttentionStructure,
    path: str,
    masks: tuple[Tensor | None, Tensor | None],
    query: Tensor,
    key: Tensor,
    batched: bool,
) -> Tensor | None:
    """Return attn_mask and key_padding_mask as one float mask, where True becomes -inf."""
    merged: Tensor | None = None
    attn_mask, key_padding_mask = masks
    for name, mask in (("attn_mask", attn_mask), ("key_padding_mask", key_padding_mask)):
        if mask is not None and not (mask.dtype is torch.bool or mask.is_floating_point()):
            raise CustomModuleError.call_failed(path, f"{name} must be bool or floating point")
    length, source, batch, heads = query.shape[0], key.shape[0], query.shape[1], structure.num_heads
    if attn_mask is not None:
        if attn_mask.dim() not in (2, 3):
            raise CustomModuleError.call_failed(path, "attn_mask must have 2 or 3 dimensions")
        leading = () if attn_mask.dim() == 2 else (batch * heads,)
        _check_shape(path, "attn_mask", attn_mask, (*leading, length, source))
        merged = _additive(attn_mask, query.dtype)
        if attn_mask.dim() == 3:
            merged = merged.reshape(batch, heads, length, source)
    if key_padding_mask is not None:
        padding = key_padding_mask if batched else key_padding_mask.unsqueeze(0)
        _check_shape(path, "key_padding_mask", padding, (batch, source))
        padding = _additive(padding, query.dtype)[:, None, None]
        merged = padding if merged is None else merged + padding
    return merged


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.is_floating_point():
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))


def _check_shape(path: str, name: str, mask: Tensor, expected: tuple[Any, ...]) -> None:
    if tuple(mask.shape) != expected:
        raise CustomModuleError.call_failed(path, f"the size of {name} does not fit query and key")
