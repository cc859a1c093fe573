"""Taps: what passes a node of a graph, or leaves a module, is kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule, Node

__all__ = ["Tap", "tap_module", "tap_nodes"]


class Tap(nn.Module):
    """Hands on what it is given and keeps a copy of the tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Tensor] = []

    def forward(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            # An op behind may write in place.
            self.values.append(value.detach().clone())
        return value

    def take(self) -> list[Tensor]:
        """What came since the last time, one tensor for each pass."""
        values, self.values = self.values, []
        return values


def tap_nodes(graph_module: GraphModule, nodes: Iterable[Node]) -> Mapping[Node, Tap]:
    """Return a tap behind each of ``nodes``, which are nodes of ``graph_module``. Changes it: hand in a
    copy."""
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
    """Return a tap of what ``module`` returns."""
    tap = Tap()

    def keep(_: nn.Module, args: Any, result: Any) -> None:
        tap(result)

    module.register_forward_hook(keep)
    return tap
