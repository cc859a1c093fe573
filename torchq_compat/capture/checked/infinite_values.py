"""Values that mean infinity, such as those of masks that are added to attention scores.

No scale can represent them together with the other values: with a scale for -1e9, every score is 0. Tensors
with such values stay float.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule, Node

from torchq_compat.capture.checked.attempts import CaptureCase
from torchq_compat.capture.checked.trial_runs import GraphRunner
from torchq_compat.support import metadata
from torchq_compat.support.graph_nodes import SLICE_END, attribute_of
from torchq_compat.support.upstream import pytree

__all__ = ["mark_infinite_values"]

#: A number of at least this size may mean infinity ...
LARGE = 1e8
#: ... if all smaller ones are at most this fraction of it.
APART = 1e-4


def mark_infinite_values(graph_module: GraphModule, case: CaptureCase) -> None:
    """Mark the nodes of a captured graph that have values which mean infinity on the example inputs.

    The graph runs only if a constant or an example input is that large.
    """
    if _may_have_any(graph_module, case.args):
        case.runs.of_graph(graph_module, case.args, runner=_Marking)


class _Marking(GraphRunner):
    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor) and stands_for_infinity(result):
            metadata.INFINITE.write(n, True)
        return result


def stands_for_infinity(values: Tensor) -> bool:
    """Return whether some of ``values`` are infinite, or so much larger than the others as to mean it."""
    if not values.is_floating_point() or not values.numel():
        return False
    sizes = values.detach().abs().double()
    others = sizes[sizes < LARGE]
    largest = float(sizes.max())
    if not largest >= LARGE:
        return False
    return math.isinf(largest) or (bool(others.numel()) and float(others.max()) <= APART * largest)


def _may_have_any(graph_module: GraphModule, args: tuple[Any, ...]) -> bool:
    constants = [leaf for node in graph_module.graph.nodes for leaf in pytree.tree_leaves(node.args)]
    # The largest index is the end of a slice.
    numbers = [leaf for leaf in constants if isinstance(leaf, (int, float)) and leaf != SLICE_END]
    if any(abs(number) >= LARGE for number in numbers):
        return True
    read = [attribute_of(graph_module, node) for node in graph_module.graph.find_nodes(op="get_attr")]
    values = [*(each for each in read if not isinstance(each, nn.Parameter)), *pytree.tree_leaves(args)]
    return any(isinstance(value, Tensor) and _has_large(value) for value in values)


def _has_large(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or not tensor.numel() or tensor.is_meta:
        return False
    return bool((tensor.detach().abs() >= LARGE).any())
