"""Which batch norms may be folded into the convolution or linear in front of them.

torchao's ``_fuse_conv_bn_`` folds every batch norm that reads a convolution: it does not check whether other
nodes read the convolution, its weight or its bias, nor whether the statistics are those of the batch.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import Argument

from torchq_compat.batch_norm.fuse import OUTPUT_DIMENSIONS, TRANSPOSED
from torchq_compat.batch_norm.nodes import BETA, EPS, GAMMA, RUNNING_MEAN, RUNNING_VAR, TRAINING

__all__ = ["unfoldable_batch_norms"]

BATCH_NORM = torch.ops.aten.batch_norm.default
#: Positions of the arguments that make two batch norms the same function in evaluation.
CONSTANTS = (GAMMA, BETA, RUNNING_MEAN, RUNNING_VAR, EPS)


def unfoldable_batch_norms(graph_module: GraphModule) -> set[Node]:
    """Return the batch norms of ``graph_module`` whose folding would change other results."""
    batch_norms = [node for node in graph_module.graph.nodes if node.target is BATCH_NORM]
    readers = _readers(graph_module)
    parameters = dict(graph_module.named_parameters(remove_duplicate=False))
    return {
        node
        for node in batch_norms
        # torchao registers the folded weight as a parameter, which fails if the weight is a buffer.
        if not _can_be_folded(node, readers) or not _names(node.args[0]) <= parameters.keys()
    }


def _readers(graph_module: GraphModule) -> dict[str, set[Node]]:
    """Return the nodes that read each parameter and buffer, by its name."""
    found: dict[str, set[Node]] = {}
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            found.setdefault(str(node.target), set()).update(node.users)
    return found


def _can_be_folded(batch_norm: Node, readers: dict[str, set[Node]]) -> bool:
    op = batch_norm.args[0]
    # After the first fold, a batch norm behind a batch norm would look like one behind the convolution.
    if not isinstance(op, Node) or op.target not in OUTPUT_DIMENSIONS or batch_norm.args[TRAINING]:
        return False
    if not all(_is_constant(batch_norm.args[position]) for position in (RUNNING_MEAN, RUNNING_VAR)):
        return False
    if op.target in TRANSPOSED and not _has_all_outputs(op, batch_norm):
        return False
    constants = [argument for argument in op.args[1:3] if argument is not None]
    # Other readers of the weight or the bias must feed an equal batch norm, as in a block called several
    # times.
    return all(
        _is_constant(constant)
        and all(_is_same_block(reader, op, batch_norm) for reader in readers[_name(constant)])
        for constant in constants
    )


def _has_all_outputs(op: Node, batch_norm: Node) -> bool:
    """Return whether the weight of a transposed convolution has an axis with all output channels: with groups
    it has none, and torch's ``fuse_conv_bn_weights`` fails (2.13)."""
    weight, mean = op.args[1], batch_norm.args[RUNNING_MEAN]
    assert isinstance(weight, Node)
    assert isinstance(mean, Node)
    return bool(weight.meta["val"].shape[1] == mean.meta["val"].shape[0])


def _is_same_block(reader: Node, op: Node, batch_norm: Node) -> bool:
    if reader.target is not op.target or len(reader.users) != 1 or _weights(reader) != _weights(op):
        return False
    (follower,) = reader.users
    return (
        follower.target is BATCH_NORM
        and follower.args[0] is reader
        and not follower.args[TRAINING]
        and all(_key(follower.args[i]) == _key(batch_norm.args[i]) for i in CONSTANTS)
    )


def _weights(op: Node) -> list[object]:
    return [_key(argument) for argument in op.args[1:3] if argument is not None]


def _names(op: Argument) -> set[str]:
    """Return the names of the weight and bias of ``op``."""
    assert isinstance(op, Node)
    return {_name(argument) for argument in op.args[1:3] if argument is not None}


def _is_constant(argument: Argument) -> bool:
    return isinstance(argument, Node) and argument.op == "get_attr"


def _name(argument: Argument) -> str:
    assert isinstance(argument, Node)
    return str(argument.target)


def _key(argument: Argument) -> object:
    """Return a key for ``argument`` that is the same for two nodes that read one attribute."""
    return argument.target if isinstance(argument, Node) and argument.op == "get_attr" else argument
