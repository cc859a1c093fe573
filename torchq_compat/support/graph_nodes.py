"""Helpers for graph nodes and the modules around them, and copies of models."""

from __future__ import annotations

import copy
import operator
import re
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import Node

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
