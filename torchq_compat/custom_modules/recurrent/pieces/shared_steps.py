"""Any quantizer, so that the steps of an unrolled LSTM share the observers of the first one.

In a cell that is a graph of its own, an observer sees the values of all steps, and the state that arrives is
observed apart from the state that leaves. Here the same: the user's quantizer annotates everything, the first
step keeps what it says, and in every other step each point shares with its counterpart in the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, Quantizer, SharedQuantizationSpec
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from torchq_compat.custom_modules.recurrent.pieces.unrolled import COPY_KEY, Copy
from torchq_compat.custom_modules.recurrent.pieces.writer import GLUE_KEY

__all__ = ["SharedStepsQuantizer"]

#: What torchao compares before it lets two points of one tensor share.
SETTINGS = ("dtype", "is_dynamic", "quant_min", "quant_max", "qscheme", "ch_axis", "scale", "zero_point")


class SharedStepsQuantizer(Quantizer):  # type: ignore[misc]
    """``quantizer``, applied to one step of each cell; glue is not quantized."""

    def __init__(self, quantizer: Quantizer) -> None:
        super().__init__()
        self.quantizer = quantizer

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        transformed: GraphModule = self.quantizer.transform_for_annotation(model)
        return transformed

    def annotate(self, model: GraphModule) -> GraphModule:
        self.quantizer.annotate(model)
        firsts: dict[tuple[str, str], Node] = {}
        for node in model.graph.nodes:
            if node.meta.get(GLUE_KEY):
                node.meta.pop(Q_ANNOTATION_KEY, None)
            copy: Copy | None = node.meta.get(COPY_KEY)
            if copy is None:
                continue
            first = firsts.setdefault((copy.cell, copy.node), node)
            if first is node:
                _share_within_the_step(node)
            else:
                _share_with(node, first)
        return model

    def validate(self, model: GraphModule) -> None:
        self.quantizer.validate(model)

    def prepare_obs_or_fq_callback(self, model: GraphModule, observers: dict[Any, Any]) -> None:
        self.quantizer.prepare_obs_or_fq_callback(model, observers)


def _share_with(node: Node, first: Node) -> None:
    """Let every point of ``node`` share with the same point of ``first``."""
    annotation = first.meta.get(Q_ANNOTATION_KEY)
    node.meta.pop(Q_ANNOTATION_KEY, None)
    if annotation is None:
        return
    counterparts = dict(zip(first.all_input_nodes, node.all_input_nodes, strict=True))
    node.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(
        input_qspec_map={
            counterparts[source]: None if spec is None else SharedQuantizationSpec((source, first))
            for source, spec in annotation.input_qspec_map.items()
        },
        output_qspec=None if annotation.output_qspec is None else SharedQuantizationSpec(first),
        allow_implicit_sharing=False,
        _annotated=True,
    )


def _share_within_the_step(node: Node) -> None:
    """Write torchao's implicit sharing out, inside the step only.

    Left to torchao, the state that leaves a step would share with the state that enters the next.
    """
    annotation = node.meta.get(Q_ANNOTATION_KEY)
    if annotation is None or not annotation.allow_implicit_sharing:
        return
    annotation.allow_implicit_sharing = False
    for source, spec in annotation.input_qspec_map.items():
        for point, other in _earlier_points(source, node):
            if _same_settings(_root(spec), _root(other)):
                annotation.input_qspec_map[source] = SharedQuantizationSpec(point)
                break


def _earlier_points(source: Node, node: Node) -> Iterator[tuple[Any, Any]]:
    """The points before ``node`` that observe ``source``, in the same step, with their specs."""
    if _step(source) != _step(node):
        return
    produced = source.meta.get(Q_ANNOTATION_KEY)
    if produced is not None and produced.output_qspec is not None:
        yield source, produced.output_qspec
    for user in source.users:
        inputs = user.meta.get(Q_ANNOTATION_KEY)
        if user < node and _step(user) == _step(node) and inputs is not None:
            yield (source, user), inputs.input_qspec_map.get(source)


def _step(node: Node) -> tuple[str, int] | None:
    copy: Copy | None = node.meta.get(COPY_KEY)
    return None if copy is None else (copy.cell, copy.step)


def _root(spec: Any) -> Any:
    """The spec that ``spec`` shares in the end."""
    while isinstance(spec, SharedQuantizationSpec):
        point = spec.edge_or_node
        if isinstance(point, tuple):
            spec = point[1].meta[Q_ANNOTATION_KEY].input_qspec_map[point[0]]
        else:
            spec = point.meta[Q_ANNOTATION_KEY].output_qspec
    return spec


def _same_settings(a: Any, b: Any) -> bool:
    if a is None or b is None:
        return False
    missing = object()
    return all(getattr(a, name, missing) == getattr(b, name, missing) for name in SETTINGS)
