"""Whether ``load_state_dict`` of our models accepts a state of FX: it refuses, unless the process enables it.

``torchq-compat run`` enables it: the script that it runs was written for FX's models and states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["accept_fx_states", "fx_state_loader"]

#: (model, state of FX) -> what ``load_state_dict`` returns.
Loader = Callable[[Any, Mapping[str, Any]], Any]
_LOADERS: list[Loader] = []


def accept_fx_states(loader: Loader) -> None:
    """Make ``loader`` load FX's states into our models, from now on in this process."""
    _LOADERS[:] = [loader]


def fx_state_loader() -> Loader | None:
    """Return the function that loads FX's states; None if they are refused."""
    return _LOADERS[0] if _LOADERS else None
