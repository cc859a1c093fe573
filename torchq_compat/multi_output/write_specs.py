"""Write settled specs into the annotations, where torchao's prepare reads them."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Graph, Node
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY
from torchao.quantization.pt2e.quantizer.quantizer import QuantizationSpecBase as Spec

from torchq_compat.multi_output.edges_and_nodes import (
    EdgeOrNode,
    Source,
    canonical_source,
    has_several,
    node_at,
)
from torchq_compat.multi_output.sharing import with_nodes

__all__ = ["write_specs"]


def write_specs(graph: Graph, specs: Mapping[EdgeOrNode, Spec]) -> None:
    """Write ``specs`` into the annotations of ``graph``, in their order, in which torchao makes observers.

    Args:
        specs: point -> spec, for every point of the graph that has one.
    """
    consumers = {point[1] for point in specs if isinstance(point, tuple)}
    left_alone = {consumer: _left_alone(consumer) for consumer in consumers}
    # From here on getitems are made and merged: a node found earlier may have been erased.
    spelled = {point: with_nodes(spec, node_at) for point, spec in specs.items()}
    for consumer, sources in left_alone.items():
        consumer.meta[Q_ANNOTATION_KEY].input_qspec_map = {node_at(source): None for source in sources}
    for point, spec in spelled.items():
        if isinstance(point, tuple):
            source, consumer = point
            consumer.meta[Q_ANNOTATION_KEY].input_qspec_map[node_at(source)] = spec
        else:
            annotation = node_at(point).meta.setdefault(Q_ANNOTATION_KEY, QuantizationAnnotation())
            annotation.output_qspec, annotation._annotated = spec, True
    for node in graph.nodes:
        annotation = node.meta.get(Q_ANNOTATION_KEY)
        if annotation is not None and has_several(node):
            annotation.output_qspec = None  # Each output has its own spec now.


def _left_alone(consumer: Node) -> list[Source]:
    """Return the inputs that the annotation of ``consumer`` names without a spec."""
    inputs = consumer.meta[Q_ANNOTATION_KEY].input_qspec_map
    return [canonical_source(source) for source, spec in inputs.items() if spec is None]
