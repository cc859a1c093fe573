"""Checks which of a Quantizer's specs became observers in the prepared graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch import nn
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.observer import NoopObserver, RecordingObserver
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY, EdgeOrNode

from torchq_compat.support.dtypes import is_integer
from torchq_compat.support.upstream import is_activation_post_process

__all__ = ["PointName", "annotated_points", "name_of", "quantizes", "unobserved_points", "unread_points"]

#: A point by node names, which outlive nodes: (producer, consumer) for an edge, (node,) for an output.
PointName = tuple[str, ...]
WATCHING_ONLY = (NoopObserver, RecordingObserver)


def name_of(point: EdgeOrNode) -> PointName:
    """Return ``point`` as node names."""
    return tuple(node.name for node in point) if isinstance(point, tuple) else (point.name,)


def annotated_points(node: Node) -> list[PointName]:
    """Return the points of ``node`` that its annotation has specs for."""
    annotation = node.meta.get(Q_ANNOTATION_KEY)
    if annotation is None:
        return []
    points = [name_of((source, node)) for source, spec in annotation.input_qspec_map.items() if spec]
    return [*points, name_of(node)] if annotation.output_qspec else points


def quantizes(observer: nn.Module) -> bool:
    """Return whether convert replaces ``observer`` by q-dq or by a cast to a narrower float dtype."""
    dtype = getattr(observer, "dtype", None)
    if dtype is None or isinstance(observer, WATCHING_ONLY):
        return False
    return is_integer(dtype) or dtype.itemsize < 4


def unobserved_points(
    prepared: GraphModule, observers: Mapping[EdgeOrNode, nn.Module | None]
) -> set[PointName]:
    """Return the points of ``prepared`` for which torchao made an observer that it did not insert.

    torchao silently does not observe a buffer that its consumer writes into.
    """
    called: dict[int, set[Node]] = {}
    for node in prepared.graph.nodes:
        if node.op == "call_module":
            module = prepared.get_submodule(str(node.target))
            if is_activation_post_process(module):
                called.setdefault(id(module), set()).add(_observed(node, prepared))
    shared = Counter(id(observer) for observer in observers.values())
    missing = set()
    for point, observer in observers.items():
        places = called.get(id(observer), set())
        source = point[0] if isinstance(point, tuple) else point
        # If a batch norm was fused for training, its scaling is between a weight and its observer.
        is_moved = bool(places) and shared[id(observer)] == 1
        if observer is not None and source not in places and not is_moved:
            missing.add(name_of(point))
    return missing


def unread_points(prepared: GraphModule) -> set[PointName]:
    """Return the outputs in ``prepared`` that are observed and then read by nothing: convert drops them."""
    return {
        name_of(_observed(node, prepared))
        for node in prepared.graph.nodes
        if node.op == "call_module"
        and not node.users
        and is_activation_post_process(prepared.get_submodule(str(node.target)))
    }


def _observed(node: Node, prepared: GraphModule) -> Node:
    """Return the node that the observer called by ``node`` observes, perhaps through other observers."""
    source = node.args[0]
    assert isinstance(source, Node)
    while source.op == "call_module" and is_activation_post_process(
        prepared.get_submodule(str(source.target))
    ):
        source = source.args[0]
        assert isinstance(source, Node)
    return source
