"""What the zoo knows about a model: how it is made, and its inputs at any sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

__all__ = ["Entry", "Inputs"]

Inputs = tuple[Any, ...]
#: By how much a batch is larger from which norms take their statistics.
LARGER = 8


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
    """

    name: str
    source: str
    make: Callable[[], nn.Module]
    inputs: Callable[..., Inputs]
    sizes: Mapping[str, int]
    others: tuple[Mapping[str, int], ...] = ()
    is_recurrent: bool = False

    def batch(self, **changes: int) -> Inputs:
        return self.inputs(**{**self.sizes, **changes})

    def large_batch(self) -> Inputs:
        """Inputs from which statistics of every channel can be taken."""
        return self.batch(**({"batch": LARGER * self.sizes["batch"]} if "batch" in self.sizes else {}))
