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
#: By how much a batch is larger from which norms take their statistics.
LARGER = 8


def whole(result: Any) -> Any:
    """All of it."""
    return result


def of_log_probabilities(result: Any) -> Any:
    """Logits of log-probabilities, as far as they are known: up to a number for each row, here their mean.
    The rows' log-sum is a large number of its own, beside which an SQNR says little."""

    def logits(value: Tensor) -> Tensor:
        return value - value.mean(-1, keepdim=True)

    first, *rest = pytree.tree_leaves(result)
    return [logits(first), *rest]


def of_probabilities(result: Any) -> Any:
    """The same of probabilities."""
    first, *rest = pytree.tree_leaves(result)
    return of_log_probabilities([torch.log(first), *rest])


@dataclass(frozen=True)
class Entry:
    """A model of the zoo.

    Attributes:
        source: where its public definition stands.
        make: builds it with random weights.
        inputs: its arguments, random, for the sizes given as keywords.
        sizes: the sizes it is prepared at.
        others: sizes it is called with besides, as changes of ``sizes``.
        is_recurrent: whether its recurrent modules are mapped, as a script with an LSTM does.
        measured: what of a result is measured: of a model that ends in a log-softmax its logits.
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
        """Inputs from which statistics of every channel can be taken."""
        return self.batch(**({"batch": LARGER * self.sizes["batch"]} if "batch" in self.sizes else {}))
