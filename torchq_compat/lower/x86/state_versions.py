"""Whether the state that packed weights were made from is still the same."""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["StateVersions"]


class StateVersions:
    """The tensors of a module and how often each was written in place, as they are now.

    What is written past torch's version counter, through ``tensor.data`` or numpy, is not seen.
    """

    def __init__(self, module: nn.Module) -> None:
        homes = [home for each in module.modules() for home in (each._parameters, each._buffers)]
        self._homes = [home for home in homes if home]
        self._tensors = self._present()
        self._ids = list(map(id, self._tensors))
        self._versions = list(map(_version, self._tensors))
        # They count or not for as long as they live.
        self._counting = [tensor for tensor in self._tensors if not tensor.is_inference()]
        self._quick = self._read_quickly()

    def are_current(self) -> bool:
        """Return whether no tensor was replaced, moved or written since."""
        present = self._present()
        if list(map(id, present)) != self._ids:
            return False
        if self._quick is not None:
            return self._read_quickly() == self._quick
        return list(map(_version, present)) == self._versions

    def _read_quickly(self) -> tuple[list[int], list[int]] | None:
        """Where all tensors are and how often they were written; None for tensors of torch.func."""
        try:
            return [t.data_ptr() for t in self._tensors], [t._version for t in self._counting]
        except RuntimeError:
            return None

    def _present(self) -> list[Tensor]:
        return [tensor for home in self._homes for tensor in home.values() if tensor is not None]


def _version(tensor: Tensor) -> tuple[int, int]:
    """Inference tensors count no versions; tensors of torch.func have no storage."""
    try:
        return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version
    except RuntimeError:
        return 0, 0
