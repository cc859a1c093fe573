"""FX's numbers of trained models in a legacy script under ``run``: convert with the observers' qparams."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["CONVERSIONS", "converting_as_fx"]

CONVERSIONS = ("convert_fx", "convert_to_reference_fx")
Function = Callable[..., Any]


def converting_as_fx(function: Function) -> Function:
    """Return ``function``; if it converts, with ``observer_qparams=True`` unless the script gives it."""
    if function.__name__ not in CONVERSIONS:
        return function

    @functools.wraps(function)
    def converting(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{"observer_qparams": True, **kwargs})

    return converting
