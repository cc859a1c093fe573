"""Per-tensor qparams in the state_dict.

PT2E writes them into the graph as literals, so the state_dict of a converted model would have integer weights
without the scales of the activations around them. They are saved as one tensor, one row per q-dq node. For
dynamic qparams, the row has what they are chosen with: the smallest scale, and the integers over which a
tensor is spread.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchq_compat.errors import CheckpointError
from torchq_compat.qspecs.qdq import CHOOSE_QPARAMS, DEQUANTIZE, QUANTIZE
from torchq_compat.support.argument_checks import shown

__all__ = ["qparams_state", "set_qparams_state"]

PER_TENSOR = (QUANTIZE, DEQUANTIZE, CHOOSE_QPARAMS)


def qparams_state(graph_module: GraphModule) -> Tensor:
    """Return the qparams of ``graph_module``, in graph order, as a float64 tensor of shape (q-dq nodes, 4).

    The columns are scale, zero point, quant_min and quant_max; for dynamic qparams smallest scale, 0, least
    and largest integer.
    """
    rows = [_row_of(node) for node in _per_tensor_nodes(graph_module)]
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, 4)


def set_qparams_state(graph_module: GraphModule, state: Tensor) -> None:
    """Write the qparams of ``state``, which ``qparams_state`` returned, into the graph.

    Raises:
        CheckpointError: ``state`` is not a tensor, has another number of q-dq nodes, or invalid qparams.
    """
    nodes = _per_tensor_nodes(graph_module)
    if not isinstance(state, Tensor):
        raise CheckpointError.bad_value("the per-tensor qparams", f"are {shown(state)}")
    if state.shape != (len(nodes), 4):
        raise CheckpointError.other_model(
            f"it has {state.shape[0]} per-tensor q-dq nodes where the model has {len(nodes)}"
        )
    if not bool(state.isfinite().all() and (state[:, 0] > 0).all()):
        raise CheckpointError.bad_value(
            "the per-tensor qparams", "are no finite numbers, or hold a scale of 0"
        )
    for node, row in zip(nodes, state.tolist(), strict=True):
        node.args = _with_row(node, row)
    graph_module.recompile()


def _row_of(node: Node) -> tuple[Any, ...]:
    if node.target is not CHOOSE_QPARAMS:
        return node.args[1:5]
    _, low, high, smallest_scale, _ = node.args
    return smallest_scale, 0, low, high


def _with_row(node: Node, row: list[float]) -> tuple[Any, ...]:
    """Return the arguments of ``node`` with the qparams of ``row``."""
    scale, zero_point, low, high = row[0], *map(int, row[1:])
    if node.target is CHOOSE_QPARAMS:
        return node.args[0], low, high, scale, *node.args[4:]
    return node.args[0], scale, zero_point, low, high, *node.args[5:]


def _per_tensor_nodes(graph_module: GraphModule) -> list[Node]:
    return [node for node in graph_module.graph.nodes if node.target in PER_TENSOR]
