"""Call layouts: how the nested arguments and results of one call lie in flat tuples of tensors.

The outer graph sees only tensors. What FX did by rerouting tuples in the graph happens here, in Python:
the nested structure of a call is taken apart by pytree before it reaches the graph and put together again
behind it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor

from torchq_compat.specs.grids import Grid

__all__ = ["CallLayout", "Structure"]


@dataclass(frozen=True)
class Structure:
    """A nested structure without its tensors: the tree, and what else hangs on it."""

    spec: pytree.TreeSpec
    constants: tuple[Any, ...]
    is_tensor: tuple[bool, ...]

    @classmethod
    def take_apart(cls, nested: Any) -> tuple[Structure, list[Tensor]]:
        """The structure of ``nested`` and its tensors in order."""
        leaves, spec = pytree.tree_flatten(nested)
        is_tensor = tuple(isinstance(leaf, Tensor) for leaf in leaves)
        constants = tuple(None if tensor else leaf for leaf, tensor in zip(leaves, is_tensor, strict=True))
        tensors = [leaf for leaf, tensor in zip(leaves, is_tensor, strict=True) if tensor]
        return cls(spec, constants, is_tensor), tensors

    def __deepcopy__(self, memo: dict[int, Any]) -> Structure:
        """A frozen value; copying its TreeSpec would warn from inside torch."""
        return self

    def put_together(self, tensors: Any) -> Any:
        """The nested structure around ``tensors`` (of any type: graph nodes as well)."""
        remaining = iter(tensors)
        leaves = [
            next(remaining) if tensor else constant
            for tensor, constant in zip(self.is_tensor, self.constants, strict=True)
        ]
        return pytree.tree_unflatten(leaves, self.spec)


@dataclass(frozen=True)
class CallLayout:
    """One call of a custom module.

    Attributes:
        inputs: structure of ``(args, kwargs)``.
        outputs: structure of the result.
        input_grids: per tensor input, the grid of the integers it arrives as, or None for floats.
        output_grids: per tensor output, the grid of the integers it leaves as, or None for floats.
    """

    inputs: Structure
    outputs: Structure
    input_grids: tuple[Grid | None, ...] = field(default=())
    output_grids: tuple[Grid | None, ...] = field(default=())

    def with_grids(self, inputs: tuple[Grid | None, ...], outputs: tuple[Grid | None, ...]) -> CallLayout:
        """The same call across a quantized boundary."""
        return replace(self, input_grids=inputs, output_grids=outputs)
