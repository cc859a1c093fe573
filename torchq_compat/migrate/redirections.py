"""Legacy FX functions -> the functions of this package, in the process that runs a legacy script.

The functions are replaced on the legacy modules themselves, so every way to import them finds the new ones:
by name, under an alias, through importlib, or as attributes of ``torch.ao.quantization``. The modules stay,
because torch and torchao use their other contents. ``torch.ao.quantization.fx.custom_config`` needs nothing:
``torchq_compat.custom_config`` has the same classes.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["REDIRECTIONS", "Redirection", "redirect"]

Function = Callable[..., Any]


class Redirection(NamedTuple):
    """Functions of a legacy module and the module that has their replacements, under the same names."""

    legacy: str
    replacement: str
    names: tuple[str, ...]


QUANTIZE_FX = ("prepare_fx", "prepare_qat_fx", "convert_fx", "convert_to_reference_fx", "fuse_fx")
BATCH_NORM = ("freeze_bn_stats", "update_bn_stats")
LSTM_UTILS = ("_get_lstm_with_individually_observed_parts", "_get_reference_quantized_lstm_module")

REDIRECTIONS = (
    Redirection("torch.ao.quantization.quantize_fx", "torchq_compat.quantize_fx", QUANTIZE_FX),
    Redirection("torch.quantization.quantize_fx", "torchq_compat.quantize_fx", QUANTIZE_FX),
    Redirection("torch.ao.quantization.fx.lstm_utils", "torchq_compat.lstm_utils", LSTM_UTILS),
    Redirection("torch.ao.nn.intrinsic.qat", "torchq_compat.batch_norm_switches", BATCH_NORM),
)


def redirect(wrap: Callable[[Function], Function]) -> None:
    """Put the replacements, each after ``wrap``, wherever this process already holds a legacy function."""
    replacements: dict[int, Function] = {}
    for redirection in REDIRECTIONS:
        if not _exists(redirection.legacy):
            continue
        legacy = importlib.import_module(redirection.legacy)
        ours = importlib.import_module(redirection.replacement)
        for name in redirection.names:
            original = getattr(legacy, name, None)
            # The old namespace re-exports the functions of the new one, and not all of them.
            if original is not None:
                replacements.setdefault(id(original), wrap(getattr(ours, name)))
    _replace_everywhere(replacements)


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _replace_everywhere(replacements: dict[int, Function]) -> None:
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in replacements:
                setattr(module, name, replacements[id(value)])
