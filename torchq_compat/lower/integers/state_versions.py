"""Whether the state that packed weights were made from is unchanged."""

from __future__ import annotations

from itertools import chain
from operator import attrgetter

from torch import Tensor, nn

__all__ = ["StateVersions"]

counted_writes = attrgetter("_version")


class StateVersions:
    """The tensors of a module and how often each was written in place, at construction.

    Writes that bypass torch's version counter, through ``tensor.data`` or numpy, are not detected.
    """

    def __init__(self, module: nn.Module) -> None:
        homes = [home for each in module.modules() for home in (each._parameters, each._buffers)]
        self._homes = [home for home in homes if home]
        found = [value for home in self._homes for value in home.values()]
        self._ids = list(map(id, found))
        self._tensors = [tensor for tensor in found if tensor is not None]
        self._versions = list(map(_version, self._tensors))
        # Whether a tensor counts versions never changes.
        self._counting = [tensor for tensor in self._tensors if not tensor.is_inference()]
        self._quick = self._read_quickly()

    def are_current(self) -> bool:
        """Return whether no tensor was replaced, moved or written since."""
        # Called before every model call, so written with loops that run in C where possible.
        if list(map(id, chain.from_iterable([home.values() for home in self._homes]))) != self._ids:
            return False
        if self._quick is not None:
            return self._read_quickly() == self._quick
        return list(map(_version, self._tensors)) == self._versions

    def _read_quickly(self) -> tuple[list[int], list[int]] | None:
        """Return the addresses and version counts of all tensors; None if there are tensors of torch.func."""
        try:
            return list(map(Tensor.data_ptr, self._tensors)), list(map(counted_writes, self._counting))
        except RuntimeError:
            return None


def _version(tensor: Tensor) -> tuple[int, int]:
    """Return address and version; inference tensors count no versions, torch.func's have no storage."""
    try:
        return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version
    except RuntimeError:
        return 0, 0
