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

from torchq_compat.annotate.call_boundary import LeafBoundary
from torchq_compat.annotate.source_partitions import OpGroup, find_groups, is_float_tensor
from torchq_compat.annotate.wrapping_quantizer import QuantizerAround
from torchq_compat.support.decisions import Action, Decision

__all__ = ["QuantizerAroundLeaves"]


class QuantizerAroundLeaves(QuantizerAround):
    """``quantizer`` for a graph with leaf calls.

    Args:
        leaves: the boundary of each leaf call of the graph.
        model: what was exported.
    """

    def __init__(
        self,
        quantizer: Quantizer,
        leaves: Mapping[Node, LeafBoundary],
        model: nn.Module,
    ) -> None:
        super().__init__(quantizer)
        self.leaves = leaves
        self.model = model
        self.decisions: tuple[Decision, ...] = ()

    def annotate(self, model: GraphModule) -> GraphModule:
        model = super().annotate(model)
        groups = find_groups(model, self.model)
        for leaf, boundary in self.leaves.items():
            leaf.meta[Q_ANNOTATION_KEY] = _annotation(leaf, boundary)
            for getitem in leaf.users:
                position = getitem.args[1]
                assert isinstance(position, int)
                _annotate_output(getitem, boundary.output_specs[position])
        self.decisions = tuple(_decision(group, self.quantizer) for group in groups)
        return model


def _annotation(leaf: Node, boundary: LeafBoundary) -> QuantizationAnnotation:
    """Each float input observed; one that its producer yields in a dtype the leaf takes, by that observer."""
    specs = {}
    for producer, spec in zip(leaf.args, boundary.input_specs, strict=False):
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


def _decision(group: OpGroup, quantizer: Quantizer) -> Decision:
    name = type(quantizer).__name__
    output = group.output.name if group.output else ""
    if any(_is_annotated(node) for node in group.nodes):
        return Decision(group.label, group.kind, Action.QUANTIZED, f"annotated by {name}", node=output)
    return Decision(group.label, group.kind, Action.FLOAT, f"{name} does not annotate it", node=output)


def _is_annotated(node: Node) -> bool:
    annotation = node.meta.get(Q_ANNOTATION_KEY)
    return annotation is not None and bool(annotation.input_qspec_map or annotation.output_qspec)
