"""Helpers for graph nodes and the modules around them: attributes, names, module paths."""

from __future__ import annotations

import operator
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import Node

__all__ = ["SLICE_END", "attribute_at", "attribute_of", "free_name", "module_path_of", "user_line_of"]

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
