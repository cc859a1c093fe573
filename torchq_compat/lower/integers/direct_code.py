"""The code of a lowered graph, which reads each tensor of the state from the dictionary that holds it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.fx import Graph
from torch.fx.graph import PythonCode

from torchq_compat.support.upstream import format_target, forward_from_src

__all__ = ["direct_forward"]

#: The prefix of names in the code.
NAME = "_torchq_compat_home_"


def direct_forward(code: PythonCode, graph: Graph, owner: nn.Module) -> Callable[..., Any]:
    """Return ``forward`` of ``code``, which was generated for ``graph``, on the state of ``owner``."""
    source, names, prefix = code.src, dict(code.globals), NAME
    while prefix in source:
        prefix += "_"
    for index, node in enumerate(graph.find_nodes(op="get_attr")):
        path, _, key = str(node.target).rpartition(".")
        home = _home_of(owner.get_submodule(path), key)
        line = f"    {node.name} = {format_target('self', str(node.target))}\n"
        if home is not None and line in source:
            names[f"{prefix}{index}"] = home
            source = source.replace(line, f"    {node.name} = {prefix}{index}[{key!r}]\n")
    forward: Callable[..., Any] = forward_from_src(source, names)
    return forward


def _home_of(module: nn.Module, key: str) -> dict[str, Any] | None:
    """Return the dictionary of ``module`` that holds its tensor ``key``."""
    return next((home for home in (module._parameters, module._buffers) if key in home), None)
