"""What ``load_state_dict`` of our models does with a state of FX: refuse it, unless a process says otherwise.

``torchq-compat run`` does: the script it runs was written for FX's models and its states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["accept_fx_states", "fx_state_loader"]

#: (model, state of FX) -> what ``load_state_dict`` returns.
Loader = Callable[[Any, Mapping[str, Any]], Any]
_LOADERS: list[Loader] = []


def accept_fx_states(loader: Loader) -> None:
    """Let ``loader`` load FX's states into our models, from now on in this process."""
    _LOADERS[:] = [loader]


def fx_state_loader() -> Loader | None:
    """What loads FX's states; None: they are refused."""
    return _LOADERS[0] if _LOADERS else None
