"""Capture functions that torch has removed, put back where a legacy script runs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchq_compat.migrate.legacy_api.removed_captures import REMOVED_CAPTURES, RemovedCapture

__all__ = ["restore_removed_captures"]


def restore_removed_captures() -> None:
    """Let modules that have lost a function of ``REMOVED_CAPTURES`` have one that does the same."""
    for removed in REMOVED_CAPTURES.values():
        module = importlib.import_module(removed.module)
        if not hasattr(module, removed.name):
            setattr(module, removed.name, _capture(removed))


def _capture(removed: RemovedCapture) -> Callable[..., Any]:
    def capture(
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        dynamic_shapes: Any = None,
        **settings: Any,
    ) -> Any:
        if removed.gave_module:
            # It traced with Dynamo; Quantizers look for the source functions that leaves.
            settings.setdefault("strict", True)
        program = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes, **settings)
        return program.module() if removed.gave_module else program

    capture.__name__ = removed.name
    capture.__module__ = removed.module
    return capture
