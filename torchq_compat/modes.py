"""Training and evaluation mode of a captured graph.

torch.export fixes the mode as a literal argument of dropout and batch norm. torchao switches it by matching
patterns, which gives a batch norm with another eps than 1e-5 that default (export_utils.py says so); here the
literal itself is changed.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

__all__ = ["drop_batch_counters", "freeze_batch_norm", "set_training"]

ATEN = torch.ops.aten
#: Position of the training flag.
DROPOUT = {
    ATEN.dropout.default: 2,
    ATEN.dropout_.default: 2,
    ATEN.feature_dropout.default: 2,
    ATEN.alpha_dropout.default: 2,
    ATEN.feature_alpha_dropout.default: 2,
}
BATCH_NORM = {ATEN.batch_norm.default: 5}
COUNT_BATCHES = ATEN.add_.Tensor
TRAINING_KEY = "torchq_compat_training"
FROZEN_KEY = "torchq_compat_batch_norm_frozen"


def set_training(graph_module: GraphModule, training: bool) -> None:
    """Switch dropout, batch norm and its batch counter. Frozen batch norms stay in evaluation."""
    graph_module.meta[TRAINING_KEY] = training
    _switch(graph_module)


def freeze_batch_norm(graph_module: GraphModule, frozen: bool) -> None:
    """Keep batch norms in evaluation while the rest trains, or let them follow the mode again."""
    graph_module.meta[FROZEN_KEY] = frozen
    _switch(graph_module)


def drop_batch_counters(graph_module: GraphModule) -> None:
    """Take the counting of training batches out of a graph that will train no more."""
    for node in list(graph_module.graph.nodes):
        if node.target is COUNT_BATCHES and _counts_batches(node):
            graph_module.graph.erase_node(node)


def _switch(graph_module: GraphModule) -> None:
    training = graph_module.meta.get(TRAINING_KEY, graph_module.training)
    collects = training and not graph_module.meta.get(FROZEN_KEY, False)
    changed = False
    for node in graph_module.graph.nodes:
        if node.target in DROPOUT:
            changed |= _set(node, DROPOUT[node.target], training)
        elif node.target in BATCH_NORM:
            changed |= _set(node, BATCH_NORM[node.target], collects)
        elif node.target is COUNT_BATCHES and _counts_batches(node):
            changed |= _set(node, 1, int(collects))
    if changed:
        graph_module.recompile()


def _set(node: Node, position: int, value: bool | int) -> bool:
    if node.args[position] == value:
        return False
    node.update_arg(position, value)
    return True


def _counts_batches(node: Node) -> bool:
    buffer = node.args[0]
    return isinstance(buffer, Node) and str(buffer.target).endswith("num_batches_tracked")
