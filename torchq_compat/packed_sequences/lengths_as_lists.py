"""Lengths that a model takes apart only to have them put together again: ``lengths.tolist()``.

Each number of the list would be a number of its own that torch.export learns at run time, and their count a
fixed batch. Handed on to ``pack_padded_sequence`` the list is the tensor it came from; a single number of it
is the ``item()`` of an element.
"""

from __future__ import annotations

from collections import UserList
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

__all__ = ["ListOfTensor"]


class ListOfTensor(UserList[Any]):
    """The list of the numbers in ``tensor``, taken apart when somebody looks into it.

    Args:
        numbers: the tensor; or a list, of what was computed from one.
        take_apart: computes the numbers of a tensor.
    """

    def __init__(
        self, numbers: Tensor | list[Any], take_apart: Callable[[], list[Any]] | None = None
    ) -> None:
        self.tensor = numbers if isinstance(numbers, Tensor) else None
        self._numbers = None if isinstance(numbers, Tensor) else list(numbers)
        self._take_apart = take_apart

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)

    def __getitem__(self, index: Any) -> Any:
        if self.tensor is not None and isinstance(index, int):
            return self.tensor[index].item()
        return self.data[index]

    @property
    def data(self) -> list[Any]:  # type: ignore[override]
        """The numbers, in a plain list."""
        if self._numbers is None:
            assert self._take_apart is not None
            self._numbers = self._take_apart()
        return self._numbers
