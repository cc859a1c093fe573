"""Report for every op whether an ExecuTorch backend took it or it runs on the portable kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

__all__ = ["DelegationReport", "read_delegation"]

IN_LOOP = "in the body of a loop, where weights are arguments and a delegate wants constants"
NO_PATTERN = "no kernel of the backend, or not in the pattern it looks for"


@dataclass(frozen=True)
class DelegationReport:
    """Operators by name, each with its count; ``str()`` is a table.

    Attributes:
        backend: ``portable`` or ``xnnpack``.
        subgraphs: the number of delegates.
        delegated: the operators that run in the delegates.
        left: the operators that the portable kernels run: (operator, reason) -> count.
    """

    backend: str
    subgraphs: int = 0
    delegated: Mapping[str, int] = field(default_factory=dict)
    left: Mapping[tuple[str, str], int] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.backend}: {sum(self.delegated.values())} operators in {self.subgraphs} delegates"]
        lines += [f"  {count:4}  {name}" for name, count in sorted(self.delegated.items())]
        lines.append(f"portable kernels: {sum(self.left.values())} operators")
        lines += [
            f"  {count:4}  {name}" + (f"  ({reason})" if reason else "")
            for (name, reason), count in sorted(self.left.items())
        ]
        return "\n".join(lines)


def read_delegation(graph_module: GraphModule, backend: str, refused: Mapping[str, str]) -> DelegationReport:
    """Return the report for the graph of an edge program.

    Args:
        refused: name of a node -> why the backend must not have it.
    """
    delegated: Counter[str] = Counter()
    left: Counter[tuple[str, str]] = Counter()
    subgraphs = 0
    for node, in_loop in _calls(graph_module):
        name = _name(node)
        if name == "executorch_call_delegate":
            subgraphs += 1
            lowered: Any = graph_module.get_submodule(str(node.all_input_nodes[0].target))
            delegated.update(_name(each) for each, _ in _calls(lowered.original_module.graph_module))
        else:
            left[name, _reason(node, in_loop, backend, refused)] += 1
    return DelegationReport(backend, subgraphs, dict(delegated), dict(left))


def _calls(graph_module: GraphModule, *, in_loop: bool = False) -> Iterator[tuple[Node, bool]]:
    """Yield the calls that compute, and whether each is in a loop."""
    for node in graph_module.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is torch.ops.higher_order.scan:
            body = graph_module.get_submodule(str(node.args[0].target))
            assert isinstance(body, GraphModule)
            yield from _calls(body, in_loop=True)
        elif isinstance(node.meta.get("val"), (torch.Tensor, tuple, list)) and _name(node) != "getitem":
            yield node, in_loop


def _reason(node: Node, in_loop: bool, backend: str, refused: Mapping[str, str]) -> str:
    if backend == "portable":
        return ""
    return refused.get(node.name) or (IN_LOOP if in_loop else NO_PATTERN)


def _name(node: Node) -> str:
    name: str = getattr(node.target, "__name__", str(node.target))
    return name.removesuffix(".default")
