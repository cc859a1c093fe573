"""Writes decisions into a graph in the form that torchao's prepare reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, Quantizer
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY, QuantizationSpecBase

__all__ = ["NodeSpecs", "SpecQuantizer"]


@dataclass
class NodeSpecs:
    """The specs of one node: one for each observed input node, and that of its output; None if the output is
    not observed."""

    inputs: dict[Node, QuantizationSpecBase] = field(default_factory=dict)
    output: QuantizationSpecBase | None = None

    def __bool__(self) -> bool:
        return bool(self.inputs) or self.output is not None


class SpecQuantizer(Quantizer):  # type: ignore[misc]
    """A torchao Quantizer that writes the specs that ``decide`` returns for a graph.

    ``decide`` is called when torchao calls ``annotate``: by then torchao's prepare for PTQ has folded batch
    norms, which erases nodes.
    """

    def __init__(self, decide: Callable[[GraphModule], Mapping[Node, NodeSpecs]]) -> None:
        super().__init__()
        self.decide = decide

    def annotate(self, model: GraphModule) -> GraphModule:
        for node, specs in self.decide(model).items():
            if specs:
                # Sharing is decided here, edge by edge; torchao's implicit sharing would join
                # observers of different classes whose ranges happen to agree.
                node.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(
                    input_qspec_map=dict(specs.inputs),
                    output_qspec=specs.output,
                    allow_implicit_sharing=False,
                    _annotated=True,
                )
        return model

    def validate(self, model: GraphModule) -> None:
        """Check nothing: the decisions were made from this graph."""
