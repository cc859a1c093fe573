"""Detects a calibration that has never seen a hidden state.

The first step of a sequence begins with zeros. In a module calibrated only with single steps, the observers
of the hidden projection have seen only its bias: every later step saturates, and SQNR falls to a few dB.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchq_compat.custom_modules.parts.part import PartKind
from torchq_compat.custom_modules.parts.part_graph import part_nodes, part_of
from torchq_compat.support.graph_nodes import attribute_of

__all__ = ["has_seen_no_hidden_state"]

GROUP = "hgates"


def has_seen_no_hidden_state(cells: Iterable[GraphModule]) -> bool:
    """Return whether every hidden projection of the prepared ``cells`` has observed only its bias, or read
    only zeros.

    False if the observers cannot show it: they keep no range, or have seen no data.
    """
    found = [
        _reads_zeros(cell, node) or _is_bias_alone(cell, node)
        for cell in cells
        for node in _hidden_projections(cell)
    ]
    return bool(found) and all(found)


def _hidden_projections(cell: GraphModule) -> list[Node]:
    return [
        node
        for _, node in part_nodes(cell)
        if part_of(node).group == GROUP and part_of(node).kind is PartKind.LINEAR
    ]


def _reads_zeros(cell: GraphModule, node: Node) -> bool:
    """Return whether the projection's input has its own observer, and that observer has seen only zeros."""
    source = node.args[0]
    return isinstance(source, Node) and _observed_range(cell, source) == (0.0, 0.0)


def _is_bias_alone(cell: GraphModule, node: Node) -> bool:
    ranges = [each for user in node.users if (each := _observed_range(cell, user)) is not None]
    if not ranges:
        return False
    bias = node.args[2] if len(node.args) > 2 else None
    values = torch.zeros(1)
    if isinstance(bias, Node) and bias.op == "get_attr":
        values = attribute_of(cell, bias).detach()
    low, high = ranges[0]
    scale = float(values.abs().max()) or 1.0
    return abs(low - float(values.min())) < 1e-6 * scale and abs(high - float(values.max())) < 1e-6 * scale


def _observed_range(cell: GraphModule, user: Node) -> tuple[float, float] | None:
    if user.op != "call_module":
        return None
    observer = cell.get_submodule(str(user.target))
    observer = getattr(observer, "activation_post_process", observer)
    low, high = getattr(observer, "min_val", None), getattr(observer, "max_val", None)
    if not isinstance(low, Tensor) or not isinstance(high, Tensor) or low.numel() != 1 or high.numel() != 1:
        return None
    return (float(low), float(high)) if torch.isfinite(low) and torch.isfinite(high) else None
