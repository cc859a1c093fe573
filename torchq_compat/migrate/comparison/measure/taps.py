"""Taps, which keep the values that pass a node of a graph, or that a module returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule, Node

__all__ = ["Tap", "tap_module", "tap_nodes"]


class Tap(nn.Module):
    """Returns its input and keeps a copy if it is a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Tensor] = []

    def forward(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            # A later op may write in place.
            self.values.append(value.detach().clone())
        return value

    def take(self) -> list[Tensor]:
        """Return the tensors since the last call of ``take``, one for each pass."""
        values, self.values = self.values, []
        return values


def tap_nodes(graph_module: GraphModule, nodes: Iterable[Node]) -> Mapping[Node, Tap]:
    """Insert a tap after each of ``nodes`` of ``graph_module``, and return the taps. This changes
    ``graph_module``: pass a copy."""
    taps: dict[Node, Tap] = {}
    for node in dict.fromkeys(nodes):
        taps[node] = Tap()
        name = f"torchq_compat_tap_of_{node.name}"
        if hasattr(graph_module, name):
            name += "_too"
        graph_module.add_submodule(name, taps[node])
        with graph_module.graph.inserting_after(node):
            graph_module.graph.call_module(name, (node,))
    graph_module.recompile()
    return taps


def tap_module(module: nn.Module) -> Tap:
    """Return a tap that keeps the results of ``module``."""
    tap = Tap()

    def keep(_: nn.Module, args: Any, result: Any) -> None:
        tap(result)

    module.register_forward_hook(keep)
    return tap
