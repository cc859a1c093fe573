"""Indices with slices, part by part: torch drops a slice that keeps the whole of the example."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchq_compat.sizes.followed_numbers import is_followed

__all__ = ["has_slices", "sliced"]

ATEN = torch.ops.aten


def has_slices(index: Any) -> bool:
    """Return whether ``index`` cuts a dimension, or holds a number that was computed from sizes."""
    parts = index if isinstance(index, tuple) else (index,)
    slices = [part for part in parts if isinstance(part, slice)]
    bounds = [bound for part in slices for bound in (part.start, part.stop, part.step)]
    if any(isinstance(bound, (Tensor, torch.SymInt)) and not is_followed(bound) for bound in bounds):
        return False  # It depends on values; torch keeps such a cut.
    return any(bound is not None for bound in bounds) or any(map(is_followed, parts))


def sliced(tensor: Tensor, index: Any) -> tuple[Tensor, tuple[Any, ...] | None]:
    """Return the part of ``tensor`` that the slices and integers of ``index`` select, one operator for each,
    as torch does, and the index of tensors that is left; None if none is."""
    parts = _without_ellipsis(list(index) if isinstance(index, tuple) else [index], tensor.dim())
    dim, rest, is_plain = 0, list[Any](), True
    for part in parts:
        if _is_number(part):
            tensor = ATEN.select.int(tensor, dim, part)
            continue
        if part is None:
            tensor = ATEN.unsqueeze.default(tensor, dim)
        elif isinstance(part, slice) and part != slice(None):
            step = () if part.step is None else (part.step,)
            tensor = ATEN.slice.Tensor(tensor, dim, part.start, part.stop, *step)
        is_plain = is_plain and (part is None or isinstance(part, slice))
        rest.append(slice(None) if part is None or isinstance(part, slice) else part)
        dim += _rank_of(rest[-1])
    return tensor, None if is_plain else tuple(rest)


def _is_number(part: Any) -> bool:
    return isinstance(part, (int, torch.SymInt)) and not isinstance(part, bool)


def _without_ellipsis(parts: list[Any], rank: int) -> list[Any]:
    at = next((index for index, part in enumerate(parts) if part is Ellipsis), None)
    if at is None:
        return parts
    taken = sum(_rank_of(part) for part in parts if part is not None and part is not Ellipsis)
    return [*parts[:at], *[slice(None)] * (rank - taken), *parts[at + 1 :]]


def _rank_of(part: Any) -> int:
    is_mask = isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8)
    return part.dim() if is_mask else 1
