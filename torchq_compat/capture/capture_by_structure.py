"""Captures modules of this package once for all that have the same structure: layers, directions and models
whose cells differ in nothing but the values of their weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from torchq_compat.capture.torch_export import capture_flat

__all__ = ["capture_by_structure"]

#: Structures that are remembered, without weights.
MOST = 128
PLAIN = (bool, int, str, tuple)
_CAPTURED: dict[Any, GraphModule] = {}


def capture_by_structure(module: nn.Module, args: tuple[Tensor, ...]) -> GraphModule:
    """Return the graph of ``module``, with its parameters, for inputs of any size.

    Args:
        module: a module whose Python reads no sizes: its graph is right at every size, though captured at
            those of ``args``. Its tensors are parameters.
        args: tensors; see ``capture_flat``.
    """
    key = (tuple(_structure(module)), tuple(map(_form, args)), torch.is_grad_enabled())
    if key not in _CAPTURED:
        captured = capture_flat(module, args, (None,) * len(args))
        if len(_CAPTURED) >= MOST:
            _CAPTURED.clear()
        _CAPTURED[key] = _with_parameters(captured, captured, "meta")
    return _with_parameters(_CAPTURED[key], module)


def _structure(module: nn.Module) -> Iterator[Any]:
    for path, each in module.named_modules():
        settings = {name: value for name, value in vars(each).items() if isinstance(value, PLAIN)}
        yield path, type(each), tuple(sorted(settings.items())), each.extra_repr()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield name, _form(parameter)


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _with_parameters(graph_module: GraphModule, source: nn.Module, device: str | None = None) -> GraphModule:
    """Return a copy of ``graph_module`` with the parameters of ``source``, or with these on ``device``."""
    parameters = dict(source.named_parameters(remove_duplicate=False))
    shared: dict[int, Any] = {}
    for name, parameter in graph_module.named_parameters(remove_duplicate=False):
        given = parameters[name]
        shared[id(parameter)] = (
            given if device is None else nn.Parameter(given.to(device), given.requires_grad)
        )
    return copy.deepcopy(graph_module, shared)
