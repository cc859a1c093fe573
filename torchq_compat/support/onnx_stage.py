"""The ONNX form of what this package made: a last stage, which only ``torch.onnx.export`` asks for.

It stands above the models that torch.onnx asks, so it is found by its name, when it is first asked for.
"""

from __future__ import annotations

import importlib
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.fx import Graph

__all__ = ["graph_for_onnx", "is_captured_for_onnx", "run_for_onnx"]

STAGE = "torchq_compat.lower.onnx.traced_forms"
_IS_RUNNING = ContextVar("torchq_compat_is_running_for_onnx", default=False)


def is_captured_for_onnx() -> bool:
    """Whether ``torch.onnx.export`` is capturing a model, whose operators ONNX may have no words for; not
    inside of ``run_for_onnx``."""
    return torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export() and not _IS_RUNNING.get()


def run_for_onnx(model: nn.Module, args: tuple[Any, ...]) -> Any:
    """Run ``model`` with operators that ONNX has; see ``lower/onnx/traced_forms.py``."""
    token = _IS_RUNNING.set(True)
    try:
        return importlib.import_module(STAGE).run_for_onnx(model, args)
    finally:
        _IS_RUNNING.reset(token)


def graph_for_onnx(model: nn.Module) -> Graph:
    """The graph of ``run_for_onnx``: torch.export interprets the graph of a GraphModule, and calls no
    ``forward``."""
    graph = Graph()
    args = graph.placeholder("*args")
    graph.output(graph.call_function(lambda given: run_for_onnx(model, tuple(given)), (args,)))
    return graph
