"""Calls with other numbers of dimensions than the example's: without a batch, or with several for one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchq_compat.support.upstream import pytree


@dataclass(frozen=True)
class OtherRank:
    """Calls that are calls of the captured model with one dimension in place of none, or of several.

    Attributes:
        of_inputs: label -> the dimension of that input.
        of_results: the dimension of each leaf of the result; None where it has none.
        several: whether there are several in place of it, else none.
    """

    of_inputs: Mapping[str, int]
    of_results: tuple[int | None, ...]
    several: bool

    def sizes(self, inputs: Mapping[str, Any], ranks: Mapping[str, int]) -> tuple[int, ...] | None:
        """Return the sizes in place of the one dimension; None if ``inputs``, by label, are not such a call.

        Args:
            ranks: label -> rank in the example.
        """
        sizes: tuple[int, ...] | None = None
        for label, rank in ranks.items():
            value, dim = inputs.get(label), self.of_inputs.get(label)
            if not isinstance(value, Tensor) or value.is_nested or (dim is None and value.dim() != rank):
                return None
            if dim is not None:
                more = value.dim() - rank
                if more < -1 or more == 0 or (more > 0) != self.several:
                    return None
                own = tuple(value.shape[dim : dim + more + 1])
                if sizes not in (None, own):
                    return None
                sizes = own
        return sizes

    def call(self, model: Callable[..., Any], args: Any, labels: Mapping[str, Any], sizes: Any) -> Any:
        """Return the result of ``model`` for ``args``, whose leaves have ``labels``."""
        leaves, spec = pytree.tree_flatten(args)
        at = [self.of_inputs.get(label) for label in labels]
        one = [self._as_one(leaf, dim, sizes) for leaf, dim in zip(leaves, at, strict=True)]
        leaves, returned = pytree.tree_flatten(model(*pytree.tree_unflatten(one, spec)))
        results = [
            self._as_given(leaf, dim, sizes) for leaf, dim in zip(leaves, self.of_results, strict=True)
        ]
        return pytree.tree_unflatten(results, returned)

    def _as_one(self, leaf: Any, dim: int | None, sizes: tuple[int, ...]) -> Any:
        if dim is None:
            return leaf
        return leaf.reshape([*leaf.shape[:dim], math.prod(sizes), *leaf.shape[dim + len(sizes) :]])

    def _as_given(self, leaf: Any, dim: int | None, sizes: tuple[int, ...]) -> Any:
        if dim is None:
            return leaf
        return leaf.reshape([*leaf.shape[:dim], *sizes, *leaf.shape[dim + 1 :]])


def words_of_ranks(forms: Iterable[OtherRank]) -> Iterator[tuple[str, str]]:
    """Yield each input that ``forms`` take at other ranks, by label, and what they take, for people."""
    words: dict[str, list[str]] = {}
    for form in forms:
        for label, dim in form.of_inputs.items():
            place = "its place" if label in words else f"place of dimension {dim}"
            text = f"with several in {place}" if form.several else f"without dimension {dim}"
            words.setdefault(label, []).append(text)
    for label, texts in words.items():
        yield label, f"also {', or '.join(texts)}"
