"""FX's numbers of trained models in a legacy script under ``run``: convert with the observers' qparams."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torchq_compat.migrate.legacy_api.legacy_names import CONVERTING

__all__ = ["converting_as_fx"]

Function = Callable[..., Any]


def converting_as_fx(function: Function) -> Function:
    """Return ``function``; if it converts, with ``observer_qparams=True`` unless the script gives it."""
    if function.__name__ not in CONVERTING:
        return function

    @functools.wraps(function)
    def converting(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{"observer_qparams": True, **kwargs})

    return converting
