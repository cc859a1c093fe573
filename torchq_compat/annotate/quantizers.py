"""Quantizers: a QConfigMapping as one, and a user's own on a graph with custom modules."""

import copy
import operator
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torchao.quantization.pt2e.observer import AffineQuantizedObserverBase, NoopObserver, RecordingObserver
from torchao.quantization.pt2e.quantizer import (
    ComposableQuantizer,
    QuantizationAnnotation,
    Quantizer,
    SharedQuantizationSpec,
)
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY, EdgeOrNode, QuantizationSpecBase

from torchq_compat.annotate.annotation import NodeSpecs, SpecQuantizer, WrappingQuantizer
from torchq_compat.annotate.decide import decide_graph
from torchq_compat.annotate.hidden_calls import HiddenCalls
from torchq_compat.annotate.observed_graph import observer_nodes
from torchq_compat.annotate.outputs import check_annotations
from torchq_compat.annotate.patterns import SourcePartition, find_source_partitions, is_float_tensor
from torchq_compat.annotate.sharing import has_several
from torchq_compat.capture.opaque_calls import OpaqueBoundary, opaque_call_nodes
from torchq_compat.capture.writes import make_out_of_place
from torchq_compat.errors import AnnotationError, ConfigError, TorchQCompatError
from torchq_compat.read.backend_configs import read_backend_config
from torchq_compat.read.observers import WeightConstructor
from torchq_compat.read.qconfig_mappings import read_qconfig_mapping
from torchq_compat.read.qspecs import make_spec
from torchq_compat.support.argument_checks import checked_arguments
from torchq_compat.support.decisions import Action, Decision, Report
from torchq_compat.support.dtypes import is_integer
from torchq_compat.support.graph_nodes import position_of, source_of
from torchq_compat.support.torch_ao import BackendConfig, QConfigMapping
from torchq_compat.support.upstream import is_activation_post_process
from torchq_compat.support.user_warnings import warn_user

# A QConfigMapping and a BackendConfig as a torchao ``Quantizer``, for the user's own ``prepare_pt2e`` call.
#
#     exported = torch.export.export(model, example_inputs).module()
#     prepared = prepare_pt2e(exported, quantizer_from(get_default_qconfig_mapping("x86")))
#
# The Quantizer applies FX's configuration of ops, but not of custom modules, which ``prepare_fx`` swaps
# before capture. Ranges are torchao's: a reduced range saturates at its end, while FX saturates at the end
# of the dtype's range.


class TranslatedQuantizer(SpecQuantizer):
    """Annotates the ops that a QConfigMapping and a BackendConfig quantize; see ``quantizer_from``.

    Nodes that an earlier quantizer in a ``ComposableQuantizer`` has annotated stay as they are.

    Attributes:
        report: the decisions about the last annotated graph, printable and machine-readable.
    """

    def __init__(self, qconfig_mapping: Any, backend_config: Any = None) -> None:
        super().__init__(self._decide)
        self._rules = read_qconfig_mapping(qconfig_mapping)
        self._backend = read_backend_config(backend_config)
        self.report = Report(())

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        make_out_of_place(model)
        return model

    def _decide(self, model: GraphModule) -> Mapping[Node, NodeSpecs]:
        decided = decide_graph(model, None, self._rules, self._backend, boundaries={})
        taken = {node for node in model.graph.nodes if is_annotated(node)}
        names = {node.name for node in taken}
        self.report = Report(
            tuple(
                _left_alone(decision) if decision.node in names else decision
                for decision in decided.decisions
            )
        )
        specs = {node: _for_any_convert(item) for node, item in decided.specs.items()}
        return {
            node: _beside(node, spec, specs, taken) if taken and spec else spec
            for node, spec in specs.items()
            if node not in taken
        }


@checked_arguments()
def quantizer_from(
    qconfig_mapping: QConfigMapping | dict[str, Any],
    backend_config: BackendConfig | dict[str, Any] | None = None,
) -> TranslatedQuantizer:
    """Return a torchao Quantizer that annotates what FX would have quantized.

    In a ``ComposableQuantizer`` it annotates what the quantizers before it did not annotate.

    Modules are identified by their path and class name in the exported graph; a class defined inside a
    function cannot be found by its name, so a rule by such an object type does not apply.

    Args:
        qconfig_mapping: a QConfigMapping or its dict form.
        backend_config: a BackendConfig or its dict form; default: torch.ao's native backend.

    Raises:
        ConfigError: a setting cannot be read; or, while annotating, QConfigs conflict in a fused pattern.

    Returns:
        The Quantizer; its ``report`` holds the decisions about the last annotated graph.

    Example:
        >>> import torch
        >>> from torch.ao.quantization import get_default_qconfig_mapping
        >>> from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
        >>> from torchq_compat import quantizer_from
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(4, 2)).eval(), torch.randn(3, 4)
        >>> exported = torch.export.export(model, (x,)).module()
        >>> prepared = prepare_pt2e(exported, quantizer_from(get_default_qconfig_mapping("x86")))
        >>> _ = prepared(x)  # calibrate
        >>> convert_pt2e(prepared)(x).shape
        torch.Size([3, 2])
    """
    return TranslatedQuantizer(qconfig_mapping, backend_config)


def is_annotated(node: Node) -> bool:
    """Return whether a Quantizer has annotated ``node``."""
    annotation = node.meta.get(Q_ANNOTATION_KEY)
    return annotation is not None and bool(annotation._annotated)


def _left_alone(decision: Decision) -> Decision:
    reason = "annotated by a quantizer before this one"
    return replace(decision, action=Action.QUANTIZED, reason=reason, warn=False)


def _beside(node: Node, specs: NodeSpecs, decided: Mapping[Node, NodeSpecs], taken: set[Node]) -> NodeSpecs:
    """Return the ``specs`` of ``node`` when those of the nodes in ``taken`` are not written.

    ``node`` observes itself what it would have shared with, or read from, observers of these nodes.
    """

    def present(spec: QuantizationSpecBase) -> QuantizationSpecBase:
        while isinstance(spec, SharedQuantizationSpec):
            point = spec.edge_or_node
            annotated = point[1] if isinstance(point, tuple) else point
            if annotated not in taken or _spec_of(point) is not None:
                return spec
            own = decided[annotated]
            meant = own.inputs[point[0]] if isinstance(point, tuple) else own.output
            assert meant is not None
            spec = meant
        return spec

    inputs = {producer: present(spec) for producer, spec in specs.inputs.items()}
    for producer in node.all_input_nodes:
        meant = decided[producer].output if producer in taken and producer in decided else None
        if meant is not None and producer not in inputs and _spec_of(producer) is None:
            inputs[producer] = present(meant)
    shared = getattr(specs.output, "edge_or_node", None)
    if shared in taken and shared in inputs:
        # An op that moves data: its output shares the observer of its input.
        return NodeSpecs(inputs, SharedQuantizationSpec((shared, node)))
    return NodeSpecs(inputs, None if specs.output is None else present(specs.output))


def _spec_of(point: Any) -> QuantizationSpecBase | None:
    """Return the annotated spec at ``point``."""
    node = point[1] if isinstance(point, tuple) else point
    annotation = node.meta[Q_ANNOTATION_KEY]
    spec: QuantizationSpecBase | None = (
        annotation.input_qspec_map.get(point[0]) if isinstance(point, tuple) else annotation.output_qspec
    )
    return spec


def _for_any_convert(specs: NodeSpecs) -> NodeSpecs:
    inputs = dict(specs.inputs)
    for producer, spec in specs.inputs.items():
        constructor = getattr(spec, "observer_or_fake_quant_ctr", None)
        if isinstance(constructor, WeightConstructor):
            inputs[producer] = make_spec(constructor.for_any_convert)
    return replace(specs, inputs=inputs)


# Checks which of a Quantizer's specs became observers in the prepared graph.


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
        return isinstance(observer, AffineQuantizedObserverBase)
    return is_integer(dtype) or dtype.itemsize < 4


def unobserved_points(
    prepared: GraphModule, observers: Mapping[EdgeOrNode, nn.Module | None]
) -> set[PointName]:
    """Return the points of ``prepared`` for which torchao made an observer that it did not insert.

    torchao silently does not observe a buffer that its consumer writes into.
    """
    called: dict[int, set[Node]] = {}
    for node, module in observer_nodes(prepared):
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


def _observed(node: Node, prepared: GraphModule) -> Node:
    """Return the node that the observer called by ``node`` observes, perhaps through other observers."""
    source = source_of(node)
    while source.op == "call_module" and is_activation_post_process(
        prepared.get_submodule(str(source.target))
    ):
        source = source_of(source)
    return source


# A user's torchao Quantizer for a graph with custom modules, whose calls this package annotates.
#
# All annotations are checked and settled, independent of the Quantizer's ``validate``, and looked up again
# in the prepared graph, so that ``explain`` reports what is actually there.


ATEN = torch.ops.aten
#: The ``op`` of annotated nodes that are no ops of the model -> the kind in decisions about them.
ENDS = {"placeholder": "input", "output": "output"}
#: The message of torchao's ComposableQuantizer if its children annotate one node (torchao 0.18).
OF_TWO_CHILDREN = re.compile(r"^Quantizer (\w+) has (changed|removed) annotations on node (\S+)$")


class QuantizerFailedError(Exception):
    """A user's Quantizer raised ``raised``."""

    def __init__(self, raised: Exception) -> None:
        super().__init__(str(raised))
        self.raised = raised


class UserQuantizer(WrappingQuantizer):
    """A user's ``quantizer`` for a graph with opaque calls, which are operators while it works.

    Args:
        quantizer: the user's Quantizer.
        boundaries: the boundary of each opaque call of the graph.
        model: the exported module.
        is_fixed: whether every size is that of the example, and so a number in the graph.

    Raises:
        ConfigError: a ComposableQuantizer has a child that is no Quantizer.
    """

    def __init__(
        self,
        quantizer: Quantizer,
        boundaries: Mapping[Node, OpaqueBoundary],
        model: nn.Module,
        *,
        is_fixed: bool = False,
    ) -> None:
        super().__init__(quantizer)
        _check_children(quantizer)
        self.boundaries = {_key(call): boundary for call, boundary in boundaries.items()}
        self.model = model
        self.is_fixed = is_fixed
        #: The calls of the outer graph, which torchao prepares before the bodies of loops.
        self.outer: HiddenCalls | None = None
        self._groups: list[SourcePartition] | None = None
        self._points: list[list[PointName]] | None = None
        self._ends: list[Node] = []
        self._observers: dict[Any, nn.Module] | None = None

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        """Hide the calls of modules, and let ``quantizer`` transform.

        Raises:
            QuantizerFailedError: ``quantizer`` raises; also from the methods below.
        """
        if self.is_fixed:
            write_sizes(model)
        self._hidden = HiddenCalls(model)
        self.outer = self.outer or self._hidden
        with self._asking():
            return super().transform_for_annotation(model)

    def annotate(self, model: GraphModule) -> GraphModule:
        """Let ``quantizer`` annotate.

        Raises:
            AnnotationError: two children of a ComposableQuantizer annotate one node.
        """
        with self._asking():
            return super().annotate(model)

    def ask(self, model: GraphModule) -> GraphModule:
        """Return ``model`` as ``quantizer`` transforms, annotates and validates it.

        Raises:
            AnnotationError: see ``annotate``.
        """
        model = self.transform_for_annotation(model)
        self.annotate(model)
        with self._asking():
            super().validate(model)
        return model

    def validate(self, model: GraphModule) -> None:
        """Let ``quantizer`` validate, annotate the calls of custom modules, and check and settle all
        annotations.

        Raises:
            AnnotationError: see ``check_annotations``.
        """
        with self._asking():
            super().validate(model)
        self._hidden.show(model)
        if self._groups is None:
            self._groups = find_source_partitions(model, self.model)
        for call in opaque_call_nodes(model):
            boundary = self.boundaries.get(_key(call))
            if boundary is None:
                continue
            if annotated_points(call):
                warn_user("TQ315", quantizer=type(self.quantizer).__name__, path=call.target)
            call.meta[Q_ANNOTATION_KEY] = _annotation(call, boundary)
            for getitem in call.users:
                spec = boundary.output_specs[position_of(getitem)]
                if spec is not None and is_float_tensor(getitem):
                    getitem.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(
                        output_qspec=spec, allow_implicit_sharing=False, _annotated=True
                    )
        check_annotations(model)
        if self._points is None:
            # If there were several getitems of one output, only one is left.
            partitions = [
                partition for partition in self._groups or () if not all(n._erased for n in partition.nodes)
            ]
            self._groups, self._points = partitions, [_points_of(partition) for partition in partitions]
            self._ends = [node for node in model.graph.nodes if node.op in ENDS and annotated_points(node)]

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            with self._hidden.active():
                yield
        except TorchQCompatError:
            raise  # It reports a faulty annotation, which the Quantizer's author has to correct.
        except Exception as cause:
            disagreed = OF_TWO_CHILDREN.search(str(cause))
            if isinstance(self.quantizer, ComposableQuantizer) and disagreed is not None:
                raise _of_two_children(self.quantizer, *disagreed.groups()) from cause
            raise QuantizerFailedError(cause) from cause

    def prepare_obs_or_fq_callback(self, model: GraphModule, observers: dict[Any, Any]) -> None:
        with self._asking():
            super().prepare_obs_or_fq_callback(model, observers)
        if self._observers is None:
            self._observers = dict(observers)

    def decisions(self, prepared: GraphModule) -> tuple[Decision, ...]:
        """Return a decision about each op and each annotated input or output of ``prepared``, torchao's
        prepared outer graph."""
        observers = self._observers or {}
        missing = unobserved_points(prepared, observers)
        idle = {
            name_of(point)
            for point, observer in observers.items()
            if observer is None or not quantizes(observer)
        }
        # Outputs that are observed and then read by nothing: convert drops them.
        unread = {
            name_of(_observed(node, prepared)) for node, _ in observer_nodes(prepared) if not node.users
        }
        name = type(self.quantizer).__name__
        decisions = [
            Decision(end.name, ENDS[end.op], Action.QUANTIZED, f"annotated by {name}", node=end.name)
            for end in self._ends
            if any(point not in missing | idle for point in annotated_points(end))
        ]
        for partition, points in zip(self._groups or (), self._points or (), strict=True):
            lost = [point for point in points if point in missing]
            is_quantized = any(point not in missing | idle | unread for point in points)
            is_misleading = bool(lost or (points and not is_quantized and not unread.intersection(points)))
            if lost:
                reason = f"annotated by {name}, but torchao observes nothing at {_shown(lost)}"
            elif is_quantized:
                reason = f"annotated by {name}"
            elif unread.intersection(points):
                reason = f"annotated by {name} where nothing reads it: {_shown(points)}"
            elif points:
                reason = f"annotated by {name} with observers that quantize nothing"
            else:
                reason = f"{name} does not annotate it"
            decision = Decision(
                partition.label,
                partition.kind,
                Action.QUANTIZED if is_quantized else Action.FLOAT,
                reason,
                node=partition.output.name if partition.output else "",
                warn=is_misleading,
                code="TQ415" if is_misleading else "",
            )
            decisions.append(decision)
        return tuple(decisions)


def own_copy(quantizer: Quantizer) -> Quantizer:
    """Return a copy of ``quantizer``, so that it remembers nothing of a trial, or ``quantizer`` itself if it
    cannot be copied."""
    try:
        copied: Quantizer = copy.deepcopy(quantizer)
    except Exception:
        return quantizer
    return copied


def write_sizes(model: GraphModule) -> None:
    """Write the sizes that ``model`` computes as the numbers that they are in the example."""
    for node in list(model.graph.nodes):
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, int):
            for user in list(node.users):
                user.args = map_arg(user.args, lambda item: value if item is node else item)  # noqa: B023
            model.graph.erase_node(node)
        elif node.target is ATEN.new_zeros.default:
            # As torch.export writes the zeros of a state.
            node.target, node.args = ATEN.zeros.default, node.args[1:]
            node.kwargs = {"dtype": value.dtype, "device": value.device}
    model.recompile()


def _key(call: Node) -> tuple[Any, Any]:
    """Return what names an opaque ``call`` in every graph that is made of its own."""
    return call.target, call.kwargs["opaque_layout"]


def _check_children(quantizer: Quantizer) -> None:
    for index, child in enumerate(quantizer.quantizers if isinstance(quantizer, ComposableQuantizer) else ()):
        if not isinstance(child, Quantizer):
            raise ConfigError.wrong_type(f"ComposableQuantizer.quantizers[{index}]", "a Quantizer", child)
        _check_children(child)


def _of_two_children(quantizer: ComposableQuantizer, child: str, did: str, node: str) -> AnnotationError:
    names = ", ".join(type(item).__name__ for item in quantizer.quantizers)
    return AnnotationError.of(
        "TQ943.of_two_children",
        child=child,
        did=did,
        node=node,
        names=names,
        Q_ANNOTATION_KEY=Q_ANNOTATION_KEY,
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


def _shown(points: list[PointName]) -> str:
    return ", ".join(
        f"the edge {' -> '.join(point)}" if len(point) == 2 else f"the output of {point[0]}"
        for point in points
    )
