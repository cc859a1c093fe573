"""Helpers for graph nodes and the modules around them, and copies of models."""

from __future__ import annotations

import copy
import operator
import re
import sys
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

# Helpers for graph nodes and the modules around them: attributes, names, module paths.


LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
#: The ``end`` of an ``aten.slice`` to the last element.
SLICE_END = sys.maxsize
#: An entry of a node's stack trace: file, line, text.
FRAME = re.compile(r'File "([^"]+)", line (\d+), in [^\n]*\n\s*([^\n]*)')


def attribute_of(owner: nn.Module, node: Node) -> Any:
    """Return the attribute of ``owner`` that a ``get_attr`` node reads."""
    return attribute_at(owner, str(node.target))


def attribute_at(owner: nn.Module, path: str) -> Any:
    """Return the attribute, most often a tensor, at the dotted ``path`` in ``owner``."""
    return operator.attrgetter(path)(owner)


def follow_devices(model: nn.Module, move: Callable[[Tensor], Tensor]) -> None:
    """Let the graphs in ``model``, whose state ``move`` has moved, make their constants where the state is.

    torch.export writes ``device=x.device`` as the device that the example was on.
    """

    @cache
    def moved(device: torch.device) -> torch.device:
        return move(torch.empty(0, device=device)).device

    def new(value: Any) -> Any:
        return moved(value) if isinstance(value, torch.device) else value

    def unasked(value: Any) -> Any:
        return None if value != new(value) else value

    for graph_module in (module for module in model.modules() if isinstance(module, GraphModule)):
        changed = False
        for node in graph_module._graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, Tensor) and moved(value.device) != value.device:
                node.meta["val"] = move(value)
            # The lengths of packed sequences, which torch.export asserts to be on the CPU, may stay there.
            change = unasked if node.target is torch.ops.aten._assert_tensor_metadata.default else new
            arguments = map_aggregate((node.args, node.kwargs), change)
            if arguments != (node.args, node.kwargs):
                node.args, node.kwargs = arguments
                changed = True
        if changed:
            graph_module.recompile()


def module_path_of(node: Node) -> str:
    """Return the path of the innermost module that called the op at ``node``; empty for the model itself.

    The path of a module's second call ends in ``@1``.
    """
    stack = node.meta.get("nn_module_stack") or {}
    return str(list(stack.values())[-1][0]) if stack else ""


def free_name(graph_module: nn.Module, wanted: str) -> str:
    """Return ``wanted``, or the first of ``wanted_1``, ... that is no attribute of ``graph_module``."""
    name, count = wanted, 0
    while hasattr(graph_module, name):
        count += 1
        name = f"{wanted}_{count}"
    return name


def user_line_of(node: Node) -> str | None:
    """Return file, line and text of the innermost line, outside torch and this package, behind ``node``."""
    for path, line, text in reversed(FRAME.findall(node.meta.get("stack_trace") or "")):
        if not path.startswith(LIBRARIES):
            return f"{Path(path).name}:{line} ({text.strip()})"
    return None


# Deep copies of float models, including models with computed weights.


Model = TypeVar("Model", bound=nn.Module)


def copied_model(model: Model) -> Model:
    """Return a deep copy of ``model``; its computed weights have their current values until recomputed."""
    return copy.deepcopy(model, copied_weights(model))


def copied_weights(model: nn.Module) -> dict[int, Any]:
    """Return a memo for ``copy.deepcopy`` with copies of the tensors that have an autograd graph, which torch
    does not copy, and of empty hooks, which make up most of the time that a copy takes.

    These are the weights that parametrizations and ``torch.nn.utils.weight_norm`` compute, and buffers that
    were written with gradients on.
    """
    copies: dict[int, Any] = {}
    for module in model.modules():
        for value in (*vars(module).values(), *module._buffers.values()):
            if type(value) is OrderedDict and not value:
                copies[id(value)] = OrderedDict()
            # A recurrent module has its weights in a list, too.
            for tensor in value if isinstance(value, list) else [value]:
                if isinstance(tensor, Tensor) and not tensor.is_leaf:
                    copies[id(tensor)] = tensor.detach().clone()
    return copies
