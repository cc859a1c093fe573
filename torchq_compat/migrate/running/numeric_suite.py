"""Make the Numeric Suite raise an error with advice if a legacy script gives it one of our models.

The suite looks for torch.ao's modules, or for their names in a state_dict; for a captured model it silently
returns nothing.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from torchq_compat.graph.graph_module import record_of
from torchq_compat.graph.numeric_suite import StateOfCaptured, suite_error
from torchq_compat.migrate.running.redirections import replace_everywhere
from torchq_compat.migrate.running.stand_ins import legacy_module

__all__ = ["refuse_numeric_suite"]

MODULES = ("torch.ao.ns._numeric_suite", "torch.ao.ns._numeric_suite_fx")
#: Keys that only the state of a captured, converted model has.
OUR_KEY = re.compile(r"(.*\.)?(_frozen_param\d+|_scale_\d+)")


def refuse_numeric_suite() -> None:
    """Let the functions of the suite raise an FxError if they are given a model of ours, or its state."""
    replacements: dict[int, Callable[..., Any]] = {}
    for name in MODULES:
        # The FX suite is missing if torch has no FX engine.
        module = legacy_module(name)
        for function in vars(module).values() if module else ():
            if inspect.isfunction(function) and function.__module__ == name:
                replacements[id(function)] = _refusing(function)
    replace_everywhere(replacements)


def _refusing(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if any(_is_ours(value) for value in (*args, *kwargs.values())):
            raise suite_error(function.__name__)
        return function(*args, **kwargs)

    return checked


def _is_ours(value: Any) -> bool:
    if isinstance(value, StateOfCaptured):
        return True
    if isinstance(value, Mapping):
        return any(isinstance(key, str) and OUR_KEY.fullmatch(key) for key in value)
    return record_of(value) is not None
