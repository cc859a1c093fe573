"""Batch norms with ``momentum=None``, whose running statistics are plain averages over all batches.

nn.BatchNorm computes the factor of a batch, one over the number of batches, in Python from a tensor, which
torch.export refuses. So these batch norms are captured with a constant momentum, and a node that computes the
factor is inserted into the prepared graph.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn
from torch.fx import GraphModule, Node

from torchq_compat.batch_norm.nodes import MOMENTUM, batch_norm_nodes
from torchq_compat.capture.training_modes import batch_counters
from torchq_compat.support.upstream import BatchNormBase

__all__ = ["average_cumulatively", "averaging_factor", "fix_averaging_factors", "give_momentum"]

#: The momentum in the captured graph; no statistic is ever updated with it.
STAND_IN = 0.1


def give_momentum(model: nn.Module) -> set[str]:
    """Set a momentum in the batch norms of ``model``, the package's own copy, that have none; return the
    paths of their running means."""
    found = set()
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, BatchNormBase) and module.track_running_stats and module.momentum is None:
            found.add(f"{path}.running_mean".removeprefix("."))
    for path in found:
        norm = model.get_submodule(path.rpartition(".")[0])
        norm.momentum = STAND_IN  # type: ignore[assignment]
    return found


def averaging_factor(batches: Tensor) -> float:
    """Return the weight of the newest batch; ``batches`` is the int64 count of batches, of shape ()."""
    return 1.0 / max(float(batches), 1.0)


def average_cumulatively(prepared: GraphModule, running_means: Collection[str]) -> None:
    """Make the batch norms with ``running_means`` use the current averaging factor if ``prepared`` counts
    their batches. Batch norms without a counter in the graph update no statistics."""
    counters = {str(node.args[0].target) for node in batch_counters(prepared)}  # type: ignore[union-attr]
    for path, node in list(batch_norm_nodes(prepared)):
        counter = path.removesuffix("running_mean") + "num_batches_tracked"
        if path in running_means and counter in counters:
            with prepared.graph.inserting_before(node):
                count = prepared.graph.get_attr(counter)
                node.update_arg(MOMENTUM, prepared.graph.call_function(averaging_factor, (count,)))
    prepared.recompile()


def fix_averaging_factors(prepared: GraphModule) -> None:
    """Remove the averaging factors from a graph that will not be trained any more."""
    for _, node in batch_norm_nodes(prepared):
        if isinstance(node.args[MOMENTUM], Node):
            node.update_arg(MOMENTUM, STAND_IN)
    prepared.graph.eliminate_dead_code()
