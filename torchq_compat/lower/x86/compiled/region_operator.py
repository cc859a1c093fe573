"""The integer kernels of one region as one operator, ``torchq_compat::lowered_region``.

torch.compile sees its name, its plain tensors and the shapes of its results, never packed weights.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from torchq_compat.errors import InputError

__all__ = ["REGION_OPERATOR", "Region", "RegionOwner", "RegionTable", "new_owner"]

NAME = "torchq_compat::lowered_region"
SCHEMA = "(Tensor[] tensors, SymInt[] sizes, int owner, int index, str digest) -> Tensor[]"


class Region(Protocol):
    """What the operator calls.

    Attributes:
        digest: a digest of what the region computes: Inductor keeps compiled code on disk, where numbers of
            owners mean nothing.
        is_first: whether the region may run before every other region of its owner.
    """

    digest: str
    is_first: bool

    def run(self, tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Run the kernels."""

    def shapes(self, tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Return fake results for fake tensors."""


class RegionOwner(Protocol):
    """A model whose regions the operator runs."""

    def kernel_regions(self) -> Sequence[Region]:
        """Return the regions that torch.compile sees."""

    def refresh_kernels(self) -> None:
        """Make the regions again if the state they were made of has changed."""


@dataclass
class RegionTable:
    """The regions of one model, with those of the models and graphs inside it.

    Attributes:
        owner: the number of the model in calls of the operator; 0: the model is not for torch.compile.
        regions: the regions, by their index in calls of the operator.
    """

    owner: int
    regions: list[Region] = field(default_factory=list)


OWNERS: weakref.WeakValueDictionary[int, RegionOwner] = weakref.WeakValueDictionary()
NUMBERS = itertools.count(1)


def new_owner(owner: RegionOwner) -> int:
    """Return a number that stands for ``owner`` in calls of the operator, as long as it lives."""
    number = next(NUMBERS)
    OWNERS[number] = owner
    return number


def _checked(region: Region | None, digest: str) -> Region:
    if region is not None and region.digest == digest:
        return region
    raise InputError(
        "compiled code calls integer kernels that its model does not have any more: other weights gave other "
        "kernels, or the model is gone",
        hint="compile it again: torch.compiler.reset(), then torch.compile(model)",
    )


def _region_at(owner: int, index: int) -> Region | None:
    model = OWNERS.get(owner)
    regions = () if model is None else model.kernel_regions()
    return regions[index] if index < len(regions) else None


def _run(tensors: list[Tensor], sizes: list[int], owner: int, index: int, digest: str) -> list[Tensor]:
    region = _region_at(owner, index)
    if region is not None and region.is_first:
        OWNERS[owner].refresh_kernels()
        region = _region_at(owner, index)
    return _checked(region, digest).run(tensors, sizes)


def _shapes(tensors: list[Tensor], sizes: list[int], owner: int, index: int, digest: str) -> list[Tensor]:
    return _checked(_region_at(owner, index), digest).shapes(tensors, sizes)


# torch already has the operator after an import that failed half-way.
if not hasattr(torch.ops.torchq_compat, "lowered_region"):
    torch.library.define(NAME, SCHEMA)
torch.library.impl(NAME, "default")(_run)
torch.library.register_fake(NAME)(_shapes)
LIBRARY = torch.library.Library("torchq_compat", "IMPL")  # type: ignore[no-untyped-call]
# Integers have no gradients.
LIBRARY.impl("lowered_region", torch.library.fallthrough_kernel, "Autograd")  # type: ignore[no-untyped-call]

#: Call it with the tensors and the sizes that a region reads, the number of its owner, its index and digest.
REGION_OPERATOR = torch.ops.torchq_compat.lowered_region.default
