"""Find the entries of a checkpoint file that ``torch.load(weights_only=True)`` does not load.

The file is read without creating any of its objects: each is replaced by a stand-in that does nothing.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

__all__ = ["packed_names"]


class _StandIn:
    """Takes the place of an object that is not created."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass


class _PackedStandIn(_StandIn):
    """Takes the place of a packed object."""


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        return _PackedStandIn if (module, name) == ("torch", "ScriptObject") else _StandIn

    def persistent_load(self, _: Any) -> Any:
        return _StandIn()


def packed_names(path: str | os.PathLike[str]) -> list[str]:
    """Return the names of the packed objects in the state at ``path``; empty if the file is unreadable."""
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(each for each in archive.namelist() if each.endswith("data.pkl"))
            content = _Reader(io.BytesIO(archive.read(name))).load()
    except Exception:  # Any failure is ignored: the names only improve an error message.
        return []
    if not isinstance(content, Mapping):
        return []
    return [str(key) for key, value in content.items() if isinstance(value, _PackedStandIn)]
