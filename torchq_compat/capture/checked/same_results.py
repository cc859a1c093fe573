"""Comparison of the results of two models."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torchq_compat.support.upstream import pytree

__all__ = ["AS_LARGE", "CAPTURED", "CAST", "DOUBTFUL", "FOLDED", "difference", "sqnr"]

#: SQNR in dB from which float32 results count as equal: for a captured graph; after a batch norm was folded
#: into a weight; when the float model runs under autocast and the graph does not.
CAPTURED, FOLDED, CAST = 80.0, 60.0, 25.0
#: The SQNR in dB that a dtype can represent.
OF_DTYPE = {torch.float16: 45.0, torch.bfloat16: 30.0}
#: The least SQNR in dB that rounding may explain; the comparison is repeated in float64.
DOUBTFUL = 20.0
#: The dB by which a difference may exceed the rounding error of the float model itself, and still be
#: rounding.
AS_LARGE = 12.0


def difference(expected: Any, actual: Any, least: float) -> str | None:
    """Return how two results differ; None if they are equal, floats to an SQNR of ``least`` dB."""
    wanted, found = pytree.tree_leaves(expected), pytree.tree_leaves(actual)
    if len(wanted) != len(found):
        return f"{len(found)} results instead of {len(wanted)}"
    return next(
        (text for pair in zip(wanted, found, strict=True) if (text := _difference(*pair, least)) is not None),
        None,
    )


def sqnr(expected: Any, actual: Any) -> float:
    """Return the least SQNR in dB of the pairs of float tensors of equal shape in two results."""
    pairs = zip(pytree.tree_leaves(expected), pytree.tree_leaves(actual), strict=False)
    floats = [(a, b) for a, b in pairs if isinstance(a, Tensor) and a.is_floating_point()]
    return min(
        (_sqnr(a, b) for a, b in floats if isinstance(b, Tensor) and a.shape == b.shape), default=math.inf
    )


def _difference(wanted: Any, found: Any, least: float) -> str | None:
    if not isinstance(wanted, Tensor) or not isinstance(found, Tensor):
        same_kind = isinstance(wanted, Tensor) == isinstance(found, Tensor)
        plain = isinstance(wanted, (bool, int, float, str))
        return None if same_kind and (not plain or wanted == found) else f"{found!r} instead of {wanted!r}"
    if wanted.shape != found.shape:
        return f"shape {tuple(found.shape)} instead of {tuple(wanted.shape)}"
    if wanted.is_meta or found.is_meta:
        return None  # There are no values to compare.
    if wanted.is_complex() and found.is_complex():
        return _difference(torch.view_as_real(wanted), torch.view_as_real(found), least)
    if not wanted.is_floating_point():
        return None if bool((wanted == found).all()) else "other integers"
    if not torch.equal(wanted.isfinite(), found.isfinite()) or not torch.equal(wanted.isnan(), found.isnan()):
        return "NaN or infinity in other places"
    measured = _sqnr(wanted, found)
    least = min(least, OF_DTYPE.get(wanted.dtype, least), OF_DTYPE.get(found.dtype, least))
    return None if measured >= least else f"{measured:.1f} dB"


def _sqnr(wanted: Tensor, found: Tensor) -> float:
    if wanted.is_meta or found.is_meta:
        return math.inf
    finite = wanted.isfinite() & found.isfinite()
    signal = torch.where(finite, wanted, 0).double()
    noise = torch.where(finite, found, 0).double() - signal
    power, error = float(signal.square().sum()), float(noise.square().sum())
    if error == 0.0:
        return math.inf
    if power == 0.0 or error < 1e-24 * max(1, noise.numel()):
        return math.inf if error < 1e-24 * max(1, noise.numel()) else -math.inf
    return 10 * math.log10(power / error)
