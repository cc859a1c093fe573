"""The positions of parameters in the arguments of aten operators: the weight that a QConfig quantizes, the
bias, and running statistics."""

from __future__ import annotations

import torch
from torch.fx import Node

__all__ = ["NORMALIZATIONS", "named_parameters_of", "parameter_nodes", "parameters_of", "weight_of"]

ATEN = torch.ops.aten
WEIGHT_AND_BIAS = {"weight": 1, "bias": 2}
#: Normalizations, whose weight is never quantized -> parameter -> position of the argument.
NORMALIZATIONS: dict[object, dict[str, int]] = {
    ATEN.layer_norm.default: {"weight": 2, "bias": 3},
    ATEN.group_norm.default: {"weight": 2, "bias": 3},
    ATEN.instance_norm.default: {"weight": 1, "bias": 2, "running_mean": 3, "running_var": 4},
    ATEN.batch_norm.default: {"weight": 1, "bias": 2, "running_mean": 3, "running_var": 4},
}
PRELU = ATEN.prelu.default
#: Operator -> parameter -> position of the argument.
PARAMETERS: dict[object, dict[str, int]] = {
    ATEN.linear.default: WEIGHT_AND_BIAS,
    ATEN.conv1d.default: WEIGHT_AND_BIAS,
    ATEN.conv1d.padding: WEIGHT_AND_BIAS,
    ATEN.conv2d.default: WEIGHT_AND_BIAS,
    ATEN.conv2d.padding: WEIGHT_AND_BIAS,
    ATEN.conv3d.default: WEIGHT_AND_BIAS,
    ATEN.conv3d.padding: WEIGHT_AND_BIAS,
    ATEN.conv_transpose1d.default: WEIGHT_AND_BIAS,
    ATEN.conv_transpose2d.input: WEIGHT_AND_BIAS,
    ATEN.conv_transpose3d.input: WEIGHT_AND_BIAS,
    ATEN.embedding.default: {"weight": 0},
    ATEN.embedding_bag.padding_idx: {"weight": 0},
    **NORMALIZATIONS,
    PRELU: {"weight": 1},
}


def weight_of(node: Node) -> Node | None:
    """Return the weight argument of ``node`` if a QConfig can quantize it, or None."""
    if node.target in NORMALIZATIONS or node.target is PRELU:
        return None
    edge = _edges(node).get("weight")
    return edge[0] if edge else None


def parameters_of(node: Node) -> dict[str, tuple[Node, Node]]:
    """Map "weight" and "bias" to the edge into ``node``, for those that ``node`` is given."""
    return {name: edge for name, edge in _edges(node).items() if name in ("weight", "bias")}


def parameter_nodes(node: Node) -> set[Node]:
    """Return all arguments of ``node`` that are parameters and not activations."""
    return {parameter for parameter, _ in _edges(node).values()}


def named_parameters_of(node: Node) -> dict[str, Node]:
    """Map each role, such as "weight" or "running_mean", to the parameter that ``node`` is given for it."""
    return {name: parameter for name, (parameter, _) in _edges(node).items()}


def _edges(node: Node) -> dict[str, tuple[Node, Node]]:
    edges = {}
    for name, position in PARAMETERS.get(node.target, {}).items():
        argument = node.args[position] if position < len(node.args) else None
        if isinstance(argument, Node):
            edges[name] = (argument, node)
    return edges
