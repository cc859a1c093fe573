"""Legacy FX functions -> the functions of this package, in the process that runs a legacy script.

The functions are replaced on the legacy modules themselves, so every kind of import finds the new ones: by
name, under an alias, through importlib, or as attributes of ``torch.ao.quantization``. The modules stay,
because torch and torchao use their other contents; a module that torch has removed gets a stand-in.
``torch.ao.quantization.fx.custom_config`` is not redirected: ``torchq_compat.custom_config`` has its classes.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torchq_compat.migrate.legacy_api.legacy_names import EAGER_FUNCTIONS, MOVED_FUNCTIONS, Moved
from torchq_compat.migrate.running.stand_ins import legacy_module, put_stand_in

__all__ = ["REDIRECTIONS", "redirect", "replace_everywhere"]

Function = Callable[..., Any]


#: Not in the table for ``rewrite``, since scripts can keep these names; redirected in a running process only.
BATCH_NORM_SWITCHES = Moved(
    "torch.ao.nn.intrinsic.qat",
    "torchq_compat.nn.intrinsic.qat",
    {name: name for name in ("freeze_bn_stats", "update_bn_stats")},
)
#: Private functions of FX that scripts call nevertheless.
PRIVATE_FUNCTIONS = (
    Moved(
        "torch.ao.quantization.quantize_fx",
        "torchq_compat.quantize_fx",
        {"_convert_to_reference_decomposed_fx": "convert_to_reference_fx"},
    ),
    Moved(
        "torch.ao.quantization.quantize_fx",
        "torchq_compat.migrate.running.private_functions",
        {"_prepare_fx": "prepare_fx", "_convert_fx": "convert_fx", "_fuse_fx": "fuse_fx"},
    ),
)
REDIRECTIONS = (*MOVED_FUNCTIONS, *EAGER_FUNCTIONS, *PRIVATE_FUNCTIONS, BATCH_NORM_SWITCHES)


def redirect(
    wrap: Callable[[Function, Function], Function], instead: Mapping[str, str] | None = None
) -> None:
    """Replace every legacy function that a module of this process holds.

    Args:
        wrap: (function of ours, the legacy function it replaces) -> the replacement. If torch has removed the
            legacy function, both arguments are ours.
        instead: function of ours -> the function to use in its place.
    """
    instead = instead or {}
    replacements: dict[int, Function] = {}
    for moved in REDIRECTIONS:
        ours = importlib.import_module(moved.replacement)
        functions = {name: getattr(ours, instead.get(new, new)) for name, new in moved.names.items()}
        legacy = legacy_module(moved.legacy)
        if legacy is None:
            put_stand_in(moved.legacy, {name: wrap(ours, ours) for name, ours in functions.items()})
            continue
        for name, function in functions.items():
            original = getattr(legacy, name, None)
            # The old namespace re-exports only some functions of the new one.
            if original is not None:
                replacements.setdefault(id(original), wrap(_with_parameters_of(original, function), original))
    replace_everywhere(replacements)


def _with_parameters_of(original: Function, function: Function) -> Function:
    """Return ``function``, ignoring keywords that only ``original`` has and that do not matter here."""
    dropped = set(inspect.signature(original).parameters) - set(inspect.signature(function).parameters)
    if not dropped:
        return function

    @functools.wraps(function)
    def without_dropped(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{key: value for key, value in kwargs.items() if key not in dropped})

    return without_dropped


def replace_everywhere(replacements: dict[int, Function]) -> None:
    """Set each attribute of a loaded module whose value has an id in ``replacements`` to the replacement."""
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in replacements:
                setattr(module, name, replacements[id(value)])
