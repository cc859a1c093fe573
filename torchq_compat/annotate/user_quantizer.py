"""A user's torchao Quantizer around custom modules: it annotates the rest, this package their edges."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.quantizer import (
    QuantizationAnnotation,
    QuantizationSpec,
    Quantizer,
    SharedQuantizationSpec,
)
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from torchq_compat.annotate.call_boundary import OpaqueBoundary
from torchq_compat.annotate.source_partitions import SourcePartition, find_source_partitions, is_float_tensor
from torchq_compat.annotate.wrapping_quantizer import WrappingQuantizer
from torchq_compat.support.decisions import Action, Decision

__all__ = ["UserQuantizer"]


class UserQuantizer(WrappingQuantizer):
    """``quantizer`` for a graph with opaque calls.

    Args:
        leaves: the boundary of each opaque call of the graph.
        model: what was exported.
    """

    def __init__(
        self,
        quantizer: Quantizer,
        boundaries: Mapping[Node, OpaqueBoundary],
        model: nn.Module,
    ) -> None:
        super().__init__(quantizer)
        self.boundaries = boundaries
        self.model = model
        self.decisions: tuple[Decision, ...] = ()

    def annotate(self, model: GraphModule) -> GraphModule:
        model = super().annotate(model)
        partitions = find_source_partitions(model, self.model)
        for call, boundary in self.boundaries.items():
            call.meta[Q_ANNOTATION_KEY] = _annotation(call, boundary)
            for getitem in call.users:
                position = getitem.args[1]
                assert isinstance(position, int)
                _annotate_output(getitem, boundary.output_specs[position])
        self.decisions = tuple(_decision(partition, self.quantizer) for partition in partitions)
        return model


def _annotation(call: Node, boundary: OpaqueBoundary) -> QuantizationAnnotation:
    """Return each float input observed; one that its producer yields in a dtype the opaque module takes, by
    that observer."""
    specs = {}
    for producer, spec in zip(call.args, boundary.input_specs, strict=False):
        assert isinstance(producer, Node)
        if spec is None or not is_float_tensor(producer):
            continue
        given = producer.meta.get(Q_ANNOTATION_KEY)
        output = given.output_qspec if given is not None else None
        shares = getattr(output, "dtype", None) in (spec.dtype, *boundary.accepted)
        specs[producer] = SharedQuantizationSpec(producer) if shares else spec
    return QuantizationAnnotation(input_qspec_map=specs, allow_implicit_sharing=False, _annotated=True)


def _annotate_output(getitem: Node, spec: QuantizationSpec | None) -> None:
    if spec is not None and is_float_tensor(getitem):
        getitem.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(
            output_qspec=spec, allow_implicit_sharing=False, _annotated=True
        )


def _decision(partition: SourcePartition, quantizer: Quantizer) -> Decision:
    name = type(quantizer).__name__
    output = partition.output.name if partition.output else ""
    if any(_is_annotated(node) for node in partition.nodes):
        return Decision(
            partition.label, partition.kind, Action.QUANTIZED, f"annotated by {name}", node=output
        )
    return Decision(
        partition.label, partition.kind, Action.FLOAT, f"{name} does not annotate it", node=output
    )


def _is_annotated(node: Node) -> bool:
    annotation = node.meta.get(Q_ANNOTATION_KEY)
    return annotation is not None and bool(annotation.input_qspec_map or annotation.output_qspec)
