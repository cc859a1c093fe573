"""Wraps any quantizer so that all steps of an unrolled LSTM share the observers of the first step.

In a cell with its own graph, an observer sees the values of all steps, and the incoming state is observed
separately from the outgoing state. The same holds here: each cell is annotated once, alone, and every step
follows the resulting plan.
"""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from torchq_compat.annotate.wrapping_quantizer import WrappingQuantizer
from torchq_compat.exported_lstm.cell_plan import CellPlan, EdgeOrNodeName, plan_cell
from torchq_compat.exported_lstm.unrolled import unrolled_cells
from torchq_compat.support import metadata

__all__ = ["SharedStepsQuantizer"]

#: The copies of a cell's nodes in the first step, by the names of the cell's nodes.
FirstStep = dict[str, Node]


class SharedStepsQuantizer(WrappingQuantizer):
    """Annotates with ``quantizer``, which plans each unrolled cell once; glue nodes are not quantized."""

    def annotate(self, model: GraphModule) -> GraphModule:
        model = super().annotate(model)
        plans = {path: plan_cell(cell, self.quantizer) for path, cell in unrolled_cells(model).items()}
        first_steps: dict[str, FirstStep] = {path: {} for path in plans}
        for node in model.graph.nodes:
            copy = metadata.COPY.of(node)
            if copy is not None or metadata.GLUE.of(node):
                node.meta.pop(Q_ANNOTATION_KEY, None)
            if copy is not None:
                first_step = first_steps[copy.cell]
                first_step.setdefault(copy.node, node)
                _follow(node, copy.node, plans[copy.cell], first_step)
        return model


def _follow(node: Node, name: str, plan: CellPlan, first_step: FirstStep) -> None:
    """Annotate ``node``, a copy of the cell's node ``name``, according to ``plan``."""

    def point(place: EdgeOrNodeName) -> Any:
        copied = first_step[place.node]
        return copied if place.position is None else (copied.all_input_nodes[place.position], copied)

    first = first_step[name] is node
    places = [place for place in plan.leader if place.node == name]
    if not places:
        return
    annotation = QuantizationAnnotation(allow_implicit_sharing=False, _annotated=True)
    for place in places:
        spec = plan.spec(place, point, first=first)
        if place.position is None:
            annotation.output_qspec = spec
        else:
            annotation.input_qspec_map[node.all_input_nodes[place.position]] = spec
    node.meta[Q_ANNOTATION_KEY] = annotation
