"""Which entries of a checkpoint file hold objects that ``torch.load(weights_only=True)`` does not load.

The file is read without making any of its objects: whatever it names is a stand-in that does nothing.
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
    """An object that is not made."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass


class _PackedStandIn(_StandIn):
    """A packed object that is not made."""


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        return _PackedStandIn if (module, name) == ("torch", "ScriptObject") else _StandIn

    def persistent_load(self, _: Any) -> Any:
        return _StandIn()


def packed_names(path: str | os.PathLike[str]) -> list[str]:
    """The names of the packed objects in the state at ``path``; none if it cannot be told."""
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(each for each in archive.namelist() if each.endswith("data.pkl"))
            content = _Reader(io.BytesIO(archive.read(name))).load()
    except Exception:  # whatever the file is, this is about a better message
        return []
    if not isinstance(content, Mapping):
        return []
    return [str(key) for key, value in content.items() if isinstance(value, _PackedStandIn)]
