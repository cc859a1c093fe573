"""Calls with other numbers of dimensions than the example's: without a batch, or with several for one."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

    def call(self, model: Callable[..., Any], args: Any, labels: Iterable[str], sizes: Sequence[int]) -> Any:
        """Return the result of ``model`` for ``args``, with ``labels``, which has ``sizes`` in place of
        the one dimension."""
        leaves, spec = pytree.tree_flatten(args)
        at, one = map(self.of_inputs.get, labels), (math.prod(sizes),)
        leaves = [in_place_of(leaf, dim, one, len(sizes)) for leaf, dim in zip(leaves, at, strict=True)]
        leaves, returned = pytree.tree_flatten(model(*pytree.tree_unflatten(leaves, spec)))
        pairs = zip(leaves, self.of_results, strict=True)
        return pytree.tree_unflatten([in_place_of(leaf, dim, sizes) for leaf, dim in pairs], returned)


def in_place_of(leaf: Any, dim: int | None, sizes: Sequence[int], count: int = 1) -> Any:
    """Return ``leaf`` with ``sizes`` in place of ``count`` dimensions from ``dim`` on; itself without one."""
    return leaf if dim is None else leaf.reshape([*leaf.shape[:dim], *sizes, *leaf.shape[dim + count :]])


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
