"""A user's torchao Quantizer for a graph with custom modules, whose calls this package annotates.

All annotations are checked and settled, independent of the Quantizer's ``validate``, and looked up again in
the prepared graph, so that ``explain`` reports what is actually there.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.quantizer import (
    ComposableQuantizer,
    QuantizationAnnotation,
    QuantizationSpec,
    Quantizer,
    SharedQuantizationSpec,
)
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from torchq_compat.annotate.call_boundary import OpaqueBoundary
from torchq_compat.annotate.carried_out import (
    PointName,
    annotated_points,
    name_of,
    quantizes,
    unobserved_points,
    unread_points,
)
from torchq_compat.annotate.source_partitions import SourcePartition, find_source_partitions, is_float_tensor
from torchq_compat.annotate.wrapping_quantizer import WrappingQuantizer
from torchq_compat.errors import AnnotationError, ConfigError
from torchq_compat.multi_output.check_annotations import check_annotations
from torchq_compat.multi_output.edges_and_nodes import has_several
from torchq_compat.support.decisions import Action, Decision
from torchq_compat.support.user_warnings import warn_user

__all__ = ["UserQuantizer"]

#: The ``op`` of annotated nodes that are no ops of the model -> the kind in decisions about them.
ENDS = {"placeholder": "input", "output": "output"}
#: The message of torchao's ComposableQuantizer if its children annotate one node (torchao 0.18).
OF_TWO_CHILDREN = re.compile(r"^Quantizer (\w+) has (changed|removed) annotations on node (\S+)$")


class UserQuantizer(WrappingQuantizer):
    """A user's ``quantizer`` for a graph with opaque calls.

    Args:
        quantizer: the user's Quantizer.
        boundaries: the boundary of each opaque call of the graph.
        model: the exported module.

    Raises:
        ConfigError: a ComposableQuantizer has a child that is no Quantizer.
    """

    def __init__(
        self,
        quantizer: Quantizer,
        boundaries: Mapping[Node, OpaqueBoundary],
        model: nn.Module,
    ) -> None:
        super().__init__(quantizer)
        _check_children(quantizer)
        self.boundaries = boundaries
        self.model = model
        self._groups: list[SourcePartition] | None = None
        self._points: list[list[PointName]] | None = None
        self._ends: list[Node] = []
        self._observers: dict[Any, nn.Module] | None = None

    def annotate(self, model: GraphModule) -> GraphModule:
        """Let ``quantizer`` annotate, then annotate the calls of custom modules.

        Raises:
            AnnotationError: two children of a ComposableQuantizer annotate one node.
        """
        try:
            model = super().annotate(model)
        except RuntimeError as cause:
            disagreed = OF_TWO_CHILDREN.search(str(cause))
            if not isinstance(self.quantizer, ComposableQuantizer) or disagreed is None:
                raise
            raise _of_two_children(self.quantizer, *disagreed.groups()) from cause
        if self._groups is None:
            self._groups = find_source_partitions(model, self.model)
        for call, boundary in self.boundaries.items():
            if call.graph is not model.graph:
                continue
            _warn_if_annotated(call, self.quantizer)
            call.meta[Q_ANNOTATION_KEY] = _annotation(call, boundary)
            for getitem in call.users:
                position = getitem.args[1]
                assert isinstance(position, int)
                _annotate_output(getitem, boundary.output_specs[position])
        return model

    def validate(self, model: GraphModule) -> None:
        """Let ``quantizer`` validate, then check and settle all annotations.

        Raises:
            AnnotationError: see ``check_annotations``.
        """
        super().validate(model)
        check_annotations(model)
        if self._points is None:
            # If there were several getitems of one output, only one is left.
            partitions = [
                partition for partition in self._groups or () if not all(n._erased for n in partition.nodes)
            ]
            self._groups, self._points = partitions, [_points_of(partition) for partition in partitions]
            self._ends = [node for node in model.graph.nodes if node.op in ENDS and annotated_points(node)]

    def prepare_obs_or_fq_callback(self, model: GraphModule, observers: dict[Any, Any]) -> None:
        super().prepare_obs_or_fq_callback(model, observers)
        if self._observers is None:
            self._observers = dict(observers)

    def decisions(self, prepared: GraphModule) -> tuple[Decision, ...]:
        """Return a decision about each op and each annotated input or output of ``prepared``, torchao's
        prepared outer graph."""
        observers = self._observers or {}
        missing = unobserved_points(prepared, observers)
        idle = {name_of(point) for point, each in observers.items() if each is None or not quantizes(each)}
        unread = unread_points(prepared)
        name = type(self.quantizer).__name__
        ends = [
            Decision(end.name, ENDS[end.op], Action.QUANTIZED, f"annotated by {name}", node=end.name)
            for end in self._ends
            if any(point not in missing | idle for point in annotated_points(end))
        ]
        return *ends, *(
            _decision(partition, points, missing, idle, unread, name)
            for partition, points in zip(self._groups or (), self._points or (), strict=True)
        )


def _check_children(quantizer: Quantizer) -> None:
    for index, child in enumerate(quantizer.quantizers if isinstance(quantizer, ComposableQuantizer) else ()):
        if not isinstance(child, Quantizer):
            raise ConfigError.wrong_type(f"ComposableQuantizer.quantizers[{index}]", "a Quantizer", child)
        _check_children(child)


def _of_two_children(quantizer: ComposableQuantizer, child: str, did: str, node: str) -> AnnotationError:
    names = ", ".join(type(each).__name__ for each in quantizer.quantizers)
    return AnnotationError(
        f"{child} {did} the annotation of {node!r} that another Quantizer of the ComposableQuantizer "
        f"({names}) wrote before it.",
        hint="let one of them annotate it; one that comes later leaves alone what has a "
        f"meta[{Q_ANNOTATION_KEY!r}].",
    )


def _points_of(partition: SourcePartition) -> list[PointName]:
    """Return the points at which ``partition`` and its parameters are annotated; an operator with several
    outputs has them at its getitems."""
    several = [node for node in partition.nodes if has_several(node)]
    read = [source for node in partition.nodes for source in node.all_input_nodes]
    parameters = [node for node in read if node.op == "get_attr"]
    nodes = dict.fromkeys([*partition.nodes, *parameters, *(user for node in several for user in node.users)])
    outside = {node for node in nodes if node not in partition.nodes}
    return [
        point
        for node in nodes
        if not node._erased
        for point in annotated_points(node)
        if node not in outside or node in parameters or (node.target is operator.getitem and len(point) == 1)
    ]


def _warn_if_annotated(call: Node, quantizer: Quantizer) -> None:
    if annotated_points(call):
        warn_user(
            f"what {type(quantizer).__name__} annotates the call of the custom module at {call.target!r} "
            "with is not used: a custom module says itself what is observed around it."
        )


def _annotation(call: Node, boundary: OpaqueBoundary) -> QuantizationAnnotation:
    """Return an annotation that observes each float input. An input whose producer is annotated with a dtype
    that the opaque module accepts shares the producer's observer."""
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


def _decision(
    partition: SourcePartition,
    points: list[PointName],
    missing: set[PointName],
    idle: set[PointName],
    unread: set[PointName],
    name: str,
) -> Decision:
    output = partition.output.name if partition.output else ""
    lost = [point for point in points if point in missing]
    if any(point not in missing | idle | unread for point in points):
        reason = f"annotated by {name}"
        if lost:
            reason += f", but torchao observes nothing at {_shown(lost)}"
        return Decision(
            partition.label, partition.kind, Action.QUANTIZED, reason, node=output, warn=bool(lost)
        )
    if lost:
        reason = f"annotated by {name}, but torchao observes nothing at {_shown(lost)}"
    elif unread.intersection(points):
        reason = f"annotated by {name} where nothing reads it: {_shown(points)}"
    elif points:
        reason = f"annotated by {name} with observers that quantize nothing"
    else:
        reason = f"{name} does not annotate it"
    is_misleading = bool(points) and not unread.intersection(points)
    return Decision(partition.label, partition.kind, Action.FLOAT, reason, node=output, warn=is_misleading)


def _shown(points: list[PointName]) -> str:
    return ", ".join(
        f"the edge {' -> '.join(point)}" if len(point) == 2 else f"the output of {point[0]}"
        for point in points
    )
