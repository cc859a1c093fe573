"""Calls into the stages that run only when ``torch.onnx.export`` or ``torch.jit`` is given a model.

These stages import the models that call them, so each is imported when it is first needed; the top says where
it is.
"""

import importlib
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from torchq_compat.support.discovery import HOMES
from torchq_compat.support.process_state import held, is_exporting

_IS_RUNNING = ContextVar("torchq_compat_is_running_for_onnx", default=False)


def stage(name: str) -> Any:
    """Return the function ``name`` of a later stage."""
    return getattr(importlib.import_module(HOMES[name]), name)


def is_captured_for_onnx() -> bool:
    """Return whether ``torch.onnx.export`` is capturing a model, whose operators ONNX may not have; False
    inside ``run_for_onnx``."""
    return is_exporting() and torch.onnx.is_in_onnx_export() and not _IS_RUNNING.get()


def run_for_onnx(model: nn.Module, args: tuple[Any, ...]) -> Any:
    """Run ``model`` with operators that ONNX has; see ``lower/onnx/forms.py``."""
    with held(_IS_RUNNING, True):
        return stage("run_for_onnx")(model, args)
