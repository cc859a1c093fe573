"""Finds where sizes come from that are computed outside of the trace, as those of a custom module's results.

A function is called once more with a followed size replaced by a prime that no model has by chance: what
becomes the prime in its results is that size, and what does not change is a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from torchq_compat.sizes.followed_numbers import Followed, FollowedInt, Size, is_followed, plain
from torchq_compat.support.upstream import pytree

__all__ = ["UNKNOWN", "called_aside"]

PRIME = 9973
#: A size that a function outside of the trace computes in another way.
UNKNOWN = Size(None, 0)


class KnowsSizes(Protocol):
    """What answers reads of sizes."""

    def sizes(self, tensor: Tensor) -> tuple[Any, ...]: ...

    def remember(self, tensor: Tensor, sizes: tuple[Any, ...]) -> None: ...

    def guard(self, expression: Any, value: Any) -> None: ...


def called_aside(reads: KnowsSizes, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call ``function`` on plain numbers, and let ``reads`` remember the sizes of what it makes."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    plain_args, plain_kwargs = pytree.tree_unflatten([plain(leaf) for leaf in leaves], spec)
    result = function(*plain_args, **plain_kwargs)
    made, sizes = _tensors(result), _followed_in(reads, leaves)
    if not sizes or not made or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None:
        return result
    found = [list[Any](tensor.shape) for tensor in made]
    for size in sizes.values():
        # A function may want equal sizes to stay equal.
        alike = [each for each, other in sizes.items() if other.node.value == size.node.value]
        for changed in ([size.node.expression], alike):
            marked = pytree.tree_unflatten([_marked(reads, leaf, changed) for leaf in leaves], spec)
            try:
                others = _tensors(function(*marked[0], **marked[1]))
            except Exception:  # It wants these sizes to be as they are.
                continue
            for place, dim, before, after in _changes(made, others):
                if not is_followed(found[place][dim]):
                    unknown = FollowedInt(Followed(reads.guard, before, UNKNOWN))
                    found[place][dim] = size if after == PRIME else unknown
            break
    for tensor, own in zip(made, found, strict=True):
        reads.remember(tensor, tuple(own))
    return result


def _tensors(nested: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(nested) if isinstance(leaf, Tensor)]


def _followed_in(reads: KnowsSizes, leaves: Sequence[Any]) -> dict[Any, Any]:
    """Return expression -> size, for the sizes among ``leaves`` and of the tensors among them."""
    sizes: list[Any] = []
    for leaf in leaves:
        sizes.extend(reads.sizes(leaf) if isinstance(leaf, Tensor) else [leaf])
    return {size.node.expression: size for size in sizes if is_followed(size)}


def _marked(reads: KnowsSizes, leaf: Any, changed: Sequence[Any]) -> Any:
    """Return ``leaf`` with the prime in place of the sizes whose expression is one of ``changed``."""

    def marked(size: Any) -> Any:
        return PRIME if is_followed(size) and size.node.expression in changed else plain(size)

    if not isinstance(leaf, Tensor):
        return marked(leaf)
    shape = [marked(size) for size in reads.sizes(leaf)]
    if not any(type(size) is int and size == PRIME for size in shape):
        return leaf
    return torch.empty(shape, dtype=leaf.dtype, device=leaf.device)


def _changes(made: Sequence[Tensor], others: Sequence[Tensor]) -> Iterator[tuple[int, int, int, int]]:
    """Yield the number of the tensor, the dimension and both sizes, of each size that is another one."""
    for place, (tensor, other) in enumerate(zip(made, others, strict=False)):
        for dim, (before, after) in enumerate(zip(tensor.shape, other.shape, strict=False)):
            # A size that depends on values is a symbol of torch.
            if type(before) is type(after) is int and before != after:
                yield place, dim, before, after
