"""Batch norms with ``momentum=None``, whose running statistics are plain averages over all batches.

nn.BatchNorm computes the factor of a batch, one over the number of batches, in Python from a tensor, which
torch.export refuses. So they are captured with a number in its place, and a node that computes the factor is
put into the prepared graph.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn
from torch.fx import GraphModule, Node

from torchq_compat.batch_norm.nodes import MOMENTUM, batch_norm_nodes
from torchq_compat.capture.training_modes import batch_counters
from torchq_compat.support.upstream import BatchNormBase

__all__ = ["average_cumulatively", "averaging_factor", "fix_averaging_factors", "give_momentum"]

#: Stands in the captured graph; no statistic is ever updated with it.
STAND_IN = 0.1


def give_momentum(model: nn.Module) -> set[str]:
    """Set a momentum where ``model``, the package's own copy, has none; return the paths of their running
    means."""
    found = set()
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, BatchNormBase) and module.track_running_stats and module.momentum is None:
            found.add(f"{path}.running_mean".removeprefix("."))
    for path in found:
        norm = model.get_submodule(path.rpartition(".")[0])
        norm.momentum = STAND_IN  # type: ignore[assignment]
    return found


def averaging_factor(batches: Tensor) -> float:
    """Weight of the newest of ``batches``, an int64 count of shape ()."""
    return 1.0 / max(float(batches), 1.0)


def average_cumulatively(prepared: GraphModule, running_means: Collection[str]) -> None:
    """Let the batch norms of ``running_means`` take the factor of the moment, where ``prepared`` counts
    batches: the others update no statistics, and the graph has no counter for them."""
    counters = {str(node.args[0].target) for node in batch_counters(prepared)}  # type: ignore[union-attr]
    for path, node in list(batch_norm_nodes(prepared)):
        counter = path.removesuffix("running_mean") + "num_batches_tracked"
        if path in running_means and counter in counters:
            with prepared.graph.inserting_before(node):
                count = prepared.graph.get_attr(counter)
                node.update_arg(MOMENTUM, prepared.graph.call_function(averaging_factor, (count,)))
    prepared.recompile()


def fix_averaging_factors(prepared: GraphModule) -> None:
    """Take the factors out of a graph that will train no more."""
    for _, node in batch_norm_nodes(prepared):
        if isinstance(node.args[MOMENTUM], Node):
            node.update_arg(MOMENTUM, STAND_IN)
    prepared.graph.eliminate_dead_code()
