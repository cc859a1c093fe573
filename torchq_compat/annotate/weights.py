"""Where aten operators keep the weight that a QConfig's weight constructor is about."""

from __future__ import annotations

import torch
from torch.fx import Node

__all__ = ["PARAMETER_POSITIONS", "weight_of"]

ATEN = torch.ops.aten
WEIGHT_POSITION: dict[object, int] = {
    ATEN.linear.default: 1,
    ATEN.conv1d.default: 1,
    ATEN.conv1d.padding: 1,
    ATEN.conv2d.default: 1,
    ATEN.conv2d.padding: 1,
    ATEN.conv3d.default: 1,
    ATEN.conv3d.padding: 1,
    ATEN.conv_transpose1d.default: 1,
    ATEN.conv_transpose2d.input: 1,
    ATEN.conv_transpose3d.input: 1,
    ATEN.embedding.default: 0,
    ATEN.embedding_bag.padding_idx: 0,
}
#: Arguments that are parameters and not activations: weight, bias, running statistics.
PARAMETER_POSITIONS: dict[object, tuple[int, ...]] = {
    **{target: (position, 2) for target, position in WEIGHT_POSITION.items()},
    ATEN.embedding.default: (0,),
    ATEN.embedding_bag.padding_idx: (0,),
    ATEN.layer_norm.default: (2, 3),
    ATEN.group_norm.default: (2, 3),
    ATEN.instance_norm.default: (1, 2, 3, 4),
    ATEN.batch_norm.default: (1, 2, 3, 4),
    ATEN.prelu.default: (1,),
}


def weight_of(node: Node) -> Node | None:
    """The weight argument of ``node``, or None."""
    position = WEIGHT_POSITION.get(node.target)
    weight = node.args[position] if position is not None else None
    return weight if isinstance(weight, Node) else None
