"""Nodes of a graph and the module around them: attributes, names, module paths."""

from __future__ import annotations

import operator
from typing import Any

from torch import nn
from torch.fx import Node

__all__ = ["attribute_of", "free_name", "module_path_of"]


def attribute_of(owner: nn.Module, node: Node) -> Any:
    """Return the attribute of ``owner`` that a ``get_attr`` node reads."""
    return operator.attrgetter(str(node.target))(owner)


def module_path_of(node: Node) -> str:
    """Return the path of the innermost module that called the op at ``node``; empty for the model itself.

    A second call of a module has ``@1`` behind its path.
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
