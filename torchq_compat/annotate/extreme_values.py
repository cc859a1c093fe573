"""Finds the nodes whose values no one scale represents: values that mean infinity, or that grow on."""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from torchq_compat.capture.checked import Attempt, CaptureCase
from torchq_compat.capture.loops.loop_module import LONGER, Loop
from torchq_compat.capture.sizes.find_sizes import group_of, sizes_at
from torchq_compat.capture.sizes.input_sizes import Dimension
from torchq_compat.capture.trial_runs import GraphRunner, observers_off, resized
from torchq_compat.ops import those
from torchq_compat.support import metadata
from torchq_compat.support.graph_nodes import SLICE_END, attribute_of
from torchq_compat.support.upstream import pytree

# Values that mean infinity, such as those of masks that are added to attention scores.
#
# No scale can represent them together with the other values: with a scale for -1e9, every score is 0.
# Tensors with such values stay float.


#: A number of at least this size may mean infinity ...
LARGE = 1e8
#: ... if all smaller ones are at most this fraction of it.
APART = 1e-4
Extremes = tuple[float, float]


def mark_infinite_values(graph_module: GraphModule, case: CaptureCase, first: tuple[Any, ...] = ()) -> None:
    """Mark the nodes of a captured graph that have values which mean infinity on the example inputs.

    The graph runs only if a constant or an example input is that large.

    Args:
        first: the inputs of a loop's first step, whose states may start at an extreme.
    """
    inputs = [args for args in (case.args, first) if args]
    if not any(_may_have_any(graph_module, args) for args in inputs):
        return
    runs = [_reached(case, graph_module, args) for args in inputs]
    for node in graph_module.graph.nodes:
        known = [run[node.name] for run in runs if node.name in run]
        if known and stand_for_infinity(*map(max, zip(*known, strict=True))):
            metadata.INFINITE.write(node, True)


def _reached(case: CaptureCase, graph_module: GraphModule, args: tuple[Any, ...]) -> dict[str, Extremes]:
    """Return name of a node -> the ``extremes`` of its floats in a run of the graph on ``args``."""
    reached: dict[str, Extremes] = {}

    class Collecting(GraphRunner):
        def run_node(self, n: Node) -> Any:
            result = super().run_node(n)
            if isinstance(result, Tensor) and result.is_floating_point():
                reached[n.name] = extremes(result)
            return result

    with observers_off(graph_module):
        case.runs.of_graph(graph_module, args, runner=Collecting)
    return reached


#: From which ratio on the largest value at twice a size counts as grown: that of noise grows by 1.4.
GROWN = 1.6


def growing_values(
    case: CaptureCase, result: Attempt, longer: Mapping[str, Iterable[tuple[Any, ...]]]
) -> dict[str, tuple[str, float]]:
    """Return name of a node -> the size that its values grow with, and by how much at twice the size.

    Only graphs with an op that goes over a dimension, or a loop, are run at other sizes, of all dimensions or
    of those of the loop: at twice the size, and, where values grew, at twice that, since states with bounds
    grow at first, too.

    Args:
        longer: for the step of a loop, size of the model -> arguments of the last step at longer sizes.
    """
    tried: dict[str, Iterable[tuple[Any, ...]]] = dict(longer)
    goes_over = any(map(_goes_over, result.graph_module.graph.nodes))
    loops = (module for module in case.runs.modules.values() if isinstance(module, Loop))
    looped = {name for loop in loops for name in loop.longer}
    over = {group_of(item) for item in result.sizes.dimensions if goes_over or item.name in looped}
    for dimension in {group_of(item): item for item in result.sizes.free if item.example > 1}.values():
        if group_of(dimension) in over:
            tried[dimension.name] = _longer(case, result, dimension)
    before = _reached(case, result.graph_module, case.args) if tried else {}
    grown: dict[str, tuple[str, float]] = {}
    for size, inputs in tried.items():
        factors: dict[str, float] = {}
        with suppress(Exception):  # A table has no entries for as many.
            last, names = before, set(before)
            for args in inputs:
                now = _reached(case, result.graph_module, args)
                names = {n for n in names & now.keys() if 0 < GROWN * last[n][0] <= now[n][0] < math.inf}
                factors = {name: factors.get(name, now[name][0] / last[name][0]) for name in names}
                if not names:
                    break
                last = now
        grown |= {name: (size, factor) for name, factor in factors.items()}
    return grown


def _longer(case: CaptureCase, result: Attempt, dimension: Dimension) -> Iterator[tuple[Any, ...]]:
    """Yield the example inputs at each of ``LONGER`` times the size of ``dimension``, up to its bounds."""
    for times in LONGER:
        groups = {group_of(dimension): times * dimension.example}
        if result.sizes.broken_rule(sizes_at(result.sizes, groups)) is not None:
            return
        yield resized(case.args, case.inputs, result.sizes, groups)


def _goes_over(node: Node) -> bool:
    """Return whether ``node`` is cumulative; offsets of an embedding bag are indexes, which are no values."""
    bags = [
        getattr(user.target, "overloadpacket", None) is torch.ops.aten.embedding_bag for user in node.users
    ]
    return node.target in those("cumulative") and not all(bags)


def stand_for_infinity(largest: float, others: float) -> bool:
    """Return whether the ``largest`` values are infinite, or so much larger than the others as to mean it."""
    return largest >= LARGE and (math.isinf(largest) or 0 <= others <= APART * largest)


def extremes(values: Tensor) -> Extremes:
    """Return the largest absolute value, and the largest below ``LARGE``; -1 if there is none."""
    if not values.numel():
        return -1.0, -1.0
    largest = max(abs(float(end)) for end in values.detach().aminmax())
    if largest < LARGE:
        return largest, largest
    sizes = values.detach().abs()
    return largest, float(torch.where(sizes < LARGE, sizes, -1.0).max())


def _may_have_any(graph_module: GraphModule, args: tuple[Any, ...]) -> bool:
    constants = [leaf for node in graph_module.graph.nodes for leaf in pytree.tree_leaves(node.args)]
    # The largest index is the end of a slice.
    numbers = [leaf for leaf in constants if isinstance(leaf, (int, float)) and leaf != SLICE_END]
    if any(abs(number) >= LARGE for number in numbers):
        return True
    read = [attribute_of(graph_module, node) for node in graph_module.graph.find_nodes(op="get_attr")]
    values = [*(item for item in read if not isinstance(item, nn.Parameter)), *pytree.tree_leaves(args)]
    tensors = [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]
    return any((item.detach().abs() >= LARGE).any() for item in tensors if item.numel() and not item.is_meta)
