"""What the zoo knows about a model: how it is made, and its inputs at any sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

__all__ = ["Entry", "Inputs", "of_log_probabilities", "of_probabilities", "whole"]

Inputs = tuple[Any, ...]
#: Factor by which batches are larger that norms take their statistics from.
LARGER = 8


def whole(result: Any) -> Any:
    """Return the whole result."""
    return result


def of_log_probabilities(result: Any) -> Any:
    """Return the logits of log-probabilities, which are known up to a number for each row: here their mean is
    0. The rows' log-sum is a large number, which would dominate an SQNR."""

    def logits(value: Tensor) -> Tensor:
        return value - value.mean(-1, keepdim=True)

    first, *rest = pytree.tree_leaves(result)
    return [logits(first), *rest]


def of_probabilities(result: Any) -> Any:
    """Return the same for probabilities."""
    first, *rest = pytree.tree_leaves(result)
    return of_log_probabilities([torch.log(first), *rest])


@dataclass(frozen=True)
class Entry:
    """A model of the zoo.

    Attributes:
        source: the place of its public definition.
        make: builds it with random weights.
        inputs: makes random arguments for the sizes given as keywords.
        sizes: the sizes it is prepared at.
        others: further sizes it is called with, as changes of ``sizes``.
        is_recurrent: whether its recurrent modules are mapped, as in a script with an LSTM.
        measured: selects what is measured of a result: the logits, for a model that ends in a log-softmax.
    """

    name: str
    source: str
    make: Callable[[], nn.Module]
    inputs: Callable[..., Inputs]
    sizes: Mapping[str, int]
    others: tuple[Mapping[str, int], ...] = ()
    is_recurrent: bool = False
    measured: Callable[[Any], Any] = whole

    def batch(self, **changes: int) -> Inputs:
        return self.inputs(**{**self.sizes, **changes})

    def large_batch(self) -> Inputs:
        """Return inputs large enough for statistics of every channel."""
        return self.batch(**({"batch": LARGER * self.sizes["batch"]} if "batch" in self.sizes else {}))
