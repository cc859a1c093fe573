"""Lengths that a model takes apart only to have them put together again: ``lengths.tolist()``.

Each number of the list would be a number of its own that torch.export learns at run time, and their count a
fixed batch. Handed on to ``pack_padded_sequence`` the list is the tensor it came from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

__all__ = ["ListOfTensor"]


class ListOfTensor(list[Any]):
    """The list of the numbers in ``tensor``, filled when somebody looks into it.

    Args:
        take_apart: computes the numbers.
    """

    def __init__(self, tensor: Tensor, take_apart: Callable[[], list[Any]]) -> None:
        super().__init__()
        self.tensor = tensor
        self._take_apart: Callable[[], list[Any]] | None = take_apart

    def filled(self) -> list[Any]:
        """The numbers, in a plain list."""
        if self._take_apart is not None:
            self.extend(self._take_apart())
            self._take_apart = None
        return [*super().__iter__()]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.filled())

    def __len__(self) -> int:
        return len(self.filled())

    def __getitem__(self, index: Any) -> Any:
        if self._take_apart is not None:
            self.filled()
        return super().__getitem__(index)
