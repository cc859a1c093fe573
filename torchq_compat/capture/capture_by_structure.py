"""Captures modules of this package once for all that have the same structure: layers, directions and models
whose cells differ in nothing but the values of their weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
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
    key = (
        tuple(_structure(module)),
        tuple(map(_form, args)),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
    )
    captured = _CAPTURED.get(key)
    if captured is None:
        captured = capture_flat(module, args)
        shapes = {name: nn.Parameter(p.to("meta"), p.requires_grad) for name, p in _parameters(captured)}
        captured = _with_parameters(captured, shapes)
        if len(_CAPTURED) >= MOST:
            _CAPTURED.clear()
        _CAPTURED[key] = captured
    return _with_parameters(captured, dict(_parameters(module)))


def _structure(module: nn.Module) -> Iterator[Any]:
    for path, each in module.named_modules():
        settings = {name: value for name, value in vars(each).items() if isinstance(value, PLAIN)}
        yield path, type(each), tuple(sorted(settings.items())), each.extra_repr()
    for name, parameter in _parameters(module):
        yield name, _form(parameter)


def _parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return module.named_parameters(remove_duplicate=False)


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _with_parameters(graph_module: GraphModule, parameters: Mapping[str, nn.Parameter]) -> GraphModule:
    """Return a copy of ``graph_module`` with ``parameters``, by name, in place of its own."""
    memo: dict[int, Any] = {id(own): parameters[name] for name, own in _parameters(graph_module)}
    return copy.deepcopy(graph_module, memo)
