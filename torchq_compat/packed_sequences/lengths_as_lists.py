"""Lengths that a model converts to a list, with ``lengths.tolist()``, and passes on as a whole.

Each number of a plain list would be a separate value that torch.export knows only at run time, and their
count would fix the batch. ``ListOfTensor`` passed to ``pack_padded_sequence`` is the tensor it came from; a
single number of it is the ``item()`` of an element.
"""

from __future__ import annotations

from collections import UserList
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

__all__ = ["ListOfTensor"]


class ListOfTensor(UserList[Any]):
    """The list of the numbers in ``tensor``, which is converted to numbers only when they are read.

    Args:
        numbers: the tensor, or a plain list of numbers computed from a ListOfTensor.
        take_apart: computes the list of numbers; required for a tensor.
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
        """The numbers as a plain list."""
        if self._numbers is None:
            assert self._take_apart is not None
            self._numbers = self._take_apart()
        return self._numbers
