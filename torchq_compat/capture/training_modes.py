"""Training and evaluation mode of a captured graph.

torch.export writes the mode as a literal argument of dropout and batch norm. torchao switches the mode by
matching patterns, which resets the eps of a batch norm to the default, 1e-5 (see its export_utils.py); here
the literal itself is changed. An op whose literal does not follow the mode in the float model, such as
``F.dropout(x, training=True)``, keeps its literal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from torchq_compat.support import metadata

__all__ = [
    "batch_counters",
    "drop_batch_counters",
    "fix_mode",
    "freeze_batch_norm",
    "has_fixed_mode",
    "set_training",
    "training_flag",
]

ATEN = torch.ops.aten
#: Op -> the position of its training flag.
DROPOUT: dict[object, int] = {
    ATEN.dropout.default: 2,
    ATEN.dropout_.default: 2,
    ATEN.feature_dropout.default: 2,
    ATEN.alpha_dropout.default: 2,
    ATEN.feature_alpha_dropout.default: 2,
    ATEN.rrelu.default: 3,
    # Dropout between the layers of recurrent operators that are kept whole for a Quantizer.
    ATEN.lstm.input: 6,
    ATEN.gru.input: 6,
    ATEN.rnn_tanh.input: 6,
    ATEN.rnn_relu.input: 6,
}
BATCH_NORM: dict[object, int] = {ATEN.batch_norm.default: 5, ATEN.instance_norm.default: 5}
COUNT_BATCHES = ATEN.add_.Tensor
FLAGS: dict[Any, int] = {**DROPOUT, **BATCH_NORM}


def training_flag(node: Node) -> bool | None:
    """Return whether ``node`` is in training; None for an op that has no such flag."""
    position = FLAGS.get(node.target)
    if position is None:
        return None
    return bool(node.args[position]) if position < len(node.args) else False


def fix_mode(node: Node) -> None:
    """Make ``node`` keep its flag in every mode of the graph."""
    metadata.FIXED_MODE.write(node, True)


def has_fixed_mode(node: Node) -> bool:
    return bool(metadata.FIXED_MODE.of(node))


def set_training(graph_module: GraphModule, training: bool) -> None:
    """Switch dropouts, batch norms and batch counters. Frozen batch norms stay in evaluation."""
    metadata.TRAINING.write(graph_module, training)
    _switch(graph_module)


def freeze_batch_norm(graph_module: GraphModule, frozen: bool) -> None:
    """Keep batch norms in evaluation while the rest trains, or let them follow the mode again."""
    metadata.FROZEN.write(graph_module, frozen)
    _switch(graph_module)


def batch_counters(graph_module: GraphModule) -> list[Node]:
    """Return the nodes that count training batches."""
    return [
        node
        for node in graph_module.graph.nodes
        if node.target is COUNT_BATCHES
        and isinstance(node.args[0], Node)
        and str(node.args[0].target).endswith("num_batches_tracked")
    ]


def drop_batch_counters(graph_module: GraphModule) -> None:
    """Remove the counting of training batches from a graph that will not be trained any more."""
    for node in batch_counters(graph_module):
        graph_module.graph.erase_node(node)


def _switch(graph_module: GraphModule) -> None:
    written = metadata.TRAINING.of(graph_module)
    training = graph_module.training if written is None else written
    collects = training and not metadata.FROZEN.of(graph_module)
    changed = False
    for node in graph_module.graph.nodes:
        if has_fixed_mode(node):
            continue
        if node.target in DROPOUT:
            changed |= _set(node, DROPOUT[node.target], training)
        elif node.target in BATCH_NORM:
            changed |= _set(node, BATCH_NORM[node.target], collects)
    for node in batch_counters(graph_module):
        if not has_fixed_mode(node):
            changed |= _set(node, 1, int(collects))
    if changed:
        graph_module.recompile()


def _set(node: Node, position: int, value: bool | int) -> bool:
    if position >= len(node.args) or node.args[position] == value:
        return False
    node.update_arg(position, value)
    return True
