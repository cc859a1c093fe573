"""Decides, op by op in graph order, what is observed; no node is changed here.

FX's rules: an op with a QConfig and a matching backend pattern has its inputs observed, unless the producer
already returns the same dtype, and its output observed, with its own observer or that of its first input.
Other ops stay float.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torchao.quantization.pt2e.quantizer import QuantizationSpec

from torchq_compat.annotate import annotation
from torchq_compat.annotate.patterns import (
    FusedPattern,
    SourcePartition,
    find_dtype_config,
    find_source_partitions,
    is_float_tensor,
    is_half_static,
    match_fused_patterns,
    takes_weight,
)
from torchq_compat.annotate.unmatched import decide_order_rules
from torchq_compat.capture.opaque_calls import OpaqueBoundary
from torchq_compat.codes import said
from torchq_compat.ops import PRELU, moved_by, preserves_values, those
from torchq_compat.read.backend_configs import BackendTable, PatternEntry
from torchq_compat.read.observers import fixed_qparams_constructor, translate_constructor
from torchq_compat.read.qconfig_mappings import QConfigRules
from torchq_compat.read.qspecs import OpSpecs, check_axis, make_spec
from torchq_compat.support import metadata
from torchq_compat.support.decisions import OF_CONSTANTS, ON_FLOATS, Action, Decision
from torchq_compat.support.dtypes import dtype_range, is_integer
from torchq_compat.support.graph_nodes import position_of
from torchq_compat.support.torch_ao import HistogramObserver, ObservationType
from torchq_compat.support.upstream import FIXED_QPARAMS_OP_TO_OBSERVER


class UnlikeFx(NamedTuple):
    """What FX does otherwise, and its code in the register."""

    code: str
    sentence: str

    @classmethod
    def of(cls, code: str, /, **places: object) -> UnlikeFx:
        return cls(code, said(code, **places))


LEFT_FLOAT_IN_FX = UnlikeFx.of("TQ506")
PRELU_IN_FX = UnlikeFx.of("TQ509")
JOINED_IN_FX = UnlikeFx.of("TQ508")
RESULT_BORROWED_IN_FX = UnlikeFx.of("TQ505", what="result")
CUT_IN_FX = UnlikeFx.of("TQ504")
BORROWED_IN_FX = UnlikeFx.of("TQ505", what="input")
#: Ops that return values without computing, which are neither reported nor observed.
SILENT_TARGETS = {"getitem", "sym_size.int"}


@dataclass(frozen=True)
class GraphDecisions:
    """The specs to write, the decisions to show, and the record by which a QConfigMapping selects each op."""

    specs: dict[Node, annotation.NodeSpecs]
    decisions: tuple[Decision, ...]
    records: tuple[tuple[Node, annotation.OpRecord], ...]


def decide_graph(
    graph_module: GraphModule,
    model: nn.Module | None,
    rules: QConfigRules,
    backend: BackendTable,
    boundaries: Mapping[Node, OpaqueBoundary],
    quantized_inputs: Iterable[Node] = (),
    quantized_outputs: Iterable[tuple[Node, Node]] = (),
    folded_into: Collection[str] = (),
) -> GraphDecisions:
    """Return the decisions about every op of ``graph_module``.

    Args:
        graph_module: the captured model, with custom modules as opaque calls.
        model: the exported module; None if only the graph is known.
        rules: the QConfigMapping.
        backend: the BackendConfig.
        boundaries: the boundary of each opaque call.
        quantized_inputs: placeholders that will accept integers.
        quantized_outputs: (node, output node) of results that will be returned as integers.
        folded_into: the labels of the ops that a batch norm may have been folded into.

    Raises:
        ConfigError: QConfigs conflict in a fused pattern, or have settings that contradict each other.
    """
    partitions = find_source_partitions(graph_module, model)
    state = _State(
        rules, backend, annotation.buffer_updates(graph_module), annotation.find_constants(graph_module)
    )
    state.decisions.extend(decide_order_rules(partitions, rules))
    matched = match_fused_patterns(partitions, rules, backend, folded_into)
    patterns = {pattern.first.nodes[-1]: pattern for pattern in matched}
    for node in quantized_inputs:
        state.take_quantized_input(node)
    for node in graph_module.graph.nodes:
        if node in boundaries:
            state.take_opaque_call(node, boundaries[node])
        elif node in patterns:
            state.take_pattern(patterns[node])
    for edge in quantized_outputs:
        state.take_quantized_output(*edge)
    records = tuple(
        (node, pattern.record) for pattern in patterns.values() for op in pattern.ops for node in op.nodes
    )
    specs = state.observed.node_specs(graph_module.graph.nodes)
    return GraphDecisions(specs, tuple(state.decisions), records)


@dataclass
class _State:
    rules: QConfigRules
    backend: BackendTable
    #: Op that updates a buffer from its old value -> the name of the buffer.
    updates: Mapping[Node, str]
    #: Nodes whose values depend on no input and no parameter.
    constants: frozenset[Node]
    observed: annotation.ObservedEdges = field(default_factory=annotation.ObservedEdges)
    decisions: list[Decision] = field(default_factory=list)
    #: The quantized dtype a node's value has for its consumers.
    dtype_of: dict[Node, torch.dtype] = field(default_factory=dict)
    #: Edges already observed, by producer: consumers that want equal observers share one.
    edges_from: dict[Node, list[tuple[annotation.EdgeOrNode, QuantizationSpec]]] = field(default_factory=dict)
    #: Outputs that share the observer of an input.
    shared: set[annotation.EdgeOrNode] = field(default_factory=set)
    #: Outputs of joins of such outputs, whose own inputs keep their observers: FX's lowering runs what shares
    #: on integers, with the qparams of its input.
    joins_shared: set[Node] = field(default_factory=set)
    #: Outputs of joins with an observer of their own; in FX they have the fixed qparams of the first input.
    joins_fixed: set[Node] = field(default_factory=set)
    #: A float result that FX treats as quantized -> what FX does to an op that reads it.
    quantized_in_fx_alone: dict[Node, UnlikeFx] = field(default_factory=dict)

    def take_opaque_call(self, node: Node, boundary: OpaqueBoundary) -> None:
        for producer, spec in zip(node.args, boundary.input_specs, strict=False):
            assert isinstance(producer, Node)
            if spec is None or not is_float_tensor(producer):
                continue
            if self.dtype_of.get(producer) not in boundary.accepted:
                self._observe_input(producer, node, spec)
        for getitem in node.users:
            position = position_of(getitem)
            dtype, spec = boundary.output_dtypes[position], boundary.output_specs[position]
            if dtype is not None:
                self.dtype_of[getitem] = dtype
            elif spec is not None and is_float_tensor(getitem):
                self.observed.observe(getitem, spec)
                self.dtype_of[getitem] = spec.dtype

    def take_quantized_input(self, placeholder: Node) -> None:
        if is_float_tensor(placeholder):
            spec = self._general_spec()
            self.observed.observe(placeholder, spec)
            self.dtype_of[placeholder] = spec.dtype

    def take_quantized_output(self, node: Node, output: Node) -> None:
        if is_float_tensor(node) and node not in self.dtype_of:
            self._observe_input(node, output, self._general_spec())

    def take_pattern(self, pattern: FusedPattern) -> None:
        partition, last = pattern.first, pattern.last
        if partition.kind in SILENT_TARGETS or (partition.output is None and not partition.inputs):
            return
        action, reason = self._decide(pattern)
        if action is Action.FLOAT:
            self._note_integers_in_fx(pattern)
        kind = " + ".join(op.kind for op in pattern.ops)
        node = last.output.name if last.output else ""
        code, unlike_fx = self._unlike_fx(pattern, action) or ("", "")
        self.decisions.append(
            Decision(partition.label, kind, action, reason, node=node, unlike_fx=unlike_fx, code=code)
        )

    def _note_integers_in_fx(self, pattern: FusedPattern) -> None:
        """Record a float op of quantized values that FX runs on integers, for those that read its result."""
        producers = {producer for producer, _ in pattern.first.inputs}
        if not producers or not producers.issubset(self.dtype_of) or pattern.last.output is None:
            return
        for node in pattern.first.nodes:
            if len(producers) > 1 and node.target is torch.ops.aten.cat.default:
                self.quantized_in_fx_alone[pattern.last.output] = JOINED_IN_FX
            elif node.target in those("integers in FX"):
                op = node.target._schema.name.removeprefix("aten::")  # type: ignore[union-attr]
                self.quantized_in_fx_alone[pattern.last.output] = UnlikeFx.of("TQ507", op=op)

    def _unlike_fx(self, pattern: FusedPattern, action: Action) -> UnlikeFx | None:
        """Return what FX does if it treats a float input as quantized; record the same for the output of an
        op that shares qparams."""
        if action is Action.FLOAT:
            return self._result_in_fx(pattern)
        inputs = [producer for producer, _ in pattern.observed_partition.inputs]
        unlike = next((unlike for n in inputs if (unlike := self.quantized_in_fx_alone.get(n))), None)
        if unlike and action is Action.SHARED and pattern.last.output is not None:
            self.quantized_in_fx_alone[pattern.last.output] = unlike
        if unlike:
            return unlike
        if action is Action.SHARED:
            return JOINED_IN_FX if pattern.last.output in self.joins_shared else None
        return self._other_numbers_in_fx(pattern, inputs)

    def _other_numbers_in_fx(self, pattern: FusedPattern, inputs: list[Node]) -> UnlikeFx | None:
        """Return what FX does to an op that both quantize, if its numbers differ."""
        if any(node.target is PRELU for node in pattern.first.nodes):
            return PRELU_IN_FX
        qconfig = pattern.selection.qconfig
        is_float = any(producer not in self.dtype_of for producer in inputs)
        is_fixed = qconfig and OpSpecs(qconfig).activation_constructor.settings.has_fixed_qparams
        if is_float and is_fixed and _has_bounded_result(pattern.first):
            return CUT_IN_FX
        if pattern.last.output in self.joins_fixed:
            return RESULT_BORROWED_IN_FX
        return _beyond_the_range_in_fx(pattern)

    def _result_in_fx(self, pattern: FusedPattern) -> UnlikeFx | None:
        """Return what FX does to a float op whose output is a result of the model."""
        output = pattern.last.output
        if output is None or self.quantized_in_fx_alone.get(output) != BORROWED_IN_FX:
            return None
        return RESULT_BORROWED_IN_FX if any(user.op == "output" for user in output.users) else None

    def _decide(self, pattern: FusedPattern) -> tuple[Action, str]:
        entry, qconfig = pattern.entry, pattern.selection.qconfig
        if pattern.first.origin.wrapped:
            return Action.FLOAT, "torch.fx.wrap makes it one float call, as in FX"
        if qconfig is None:
            return Action.FLOAT, f"its qconfig is None ({pattern.selection.rule})"
        if pattern.last.output is None:
            return Action.FLOAT, "it has no single float output that could be observed"
        if entry is None:
            return Action.FLOAT, f"the backend config {self.backend.name!r} has no pattern for it"
        if pattern.last.output in self.constants and not pattern.first.origin.is_module_call:
            return Action.FLOAT, OF_CONSTANTS
        updated = next((self.updates[n] for n in pattern.first.nodes if n in self.updates), "")
        if updated and not pattern.first.parameters:
            return Action.FLOAT, f"it updates the buffer {updated!r} from its old value: no range holds it"
        if (infinite := _infinite_value(pattern)) is not None:
            return Action.FLOAT, f"values of {infinite} stand for infinity: no scale holds all of them"
        return self._quantize(pattern, entry, OpSpecs(qconfig))

    def _quantize(self, pattern: FusedPattern, entry: PatternEntry, specs: OpSpecs) -> tuple[Action, str]:
        """Quantize ``pattern`` by ``specs`` if ``entry`` allows it; return the action and the reason."""
        partition = pattern.observed_partition
        if specs.reuses_input:
            return self._share_with_input(pattern, specs)
        roles = {"has_weight": "weight" in partition.parameters, "has_bias": "bias" in partition.parameters}
        config = find_dtype_config(entry, specs, **roles)
        if isinstance(config, str):
            return Action.FLOAT, config
        if entry.observation_for(partition.tensor_count) is SHARE and pattern.observes_inputs:
            return self._share_with_input(pattern, specs)
        is_module = partition.origin.is_module_call
        quantize_weight = takes_weight(entry, specs) if is_module else _is_quantized(config.weight_dtype)
        self._observe_op(pattern, specs, quantize_weight=quantize_weight)
        edge = partition.parameters.get("bias")
        if not is_module and is_half_static(specs) and edge is not None and specs.activation is not None:
            # As FX does, which leaves the bias of a module alone.
            self.observed.observe(edge, specs.activation)
        return Action.QUANTIZED, f"qconfig from {pattern.selection.rule}"

    def _observe_op(self, pattern: FusedPattern, specs: OpSpecs, *, quantize_weight: bool) -> None:
        partition, output, activation = pattern.observed_partition, pattern.last.output, specs.activation
        if activation is not None:
            for producer, node in partition.inputs:
                self._observe_input(producer, node, self._input_spec(partition, specs))
        if quantize_weight and specs.weight is not None:
            for weight, node in partition.weights:
                spec = specs.weight if weight.op == "get_attr" else specs.computed_weight
                axis_of = specs.weight_constructor.settings
                check_axis(axis_of, weight.meta["val"].dim(), f"the weight of {partition.label!r}")
                self.observed.observe((weight, node), spec)
        if activation is not None and not specs.is_dynamic:
            assert output is not None
            self.observed.observe(output, activation)
            self.dtype_of[output] = specs.activation_dtype

    def _input_spec(self, partition: SourcePartition, specs: OpSpecs) -> QuantizationSpec:
        """Return the spec of the inputs.

        FX observes an input with the constructor of the output. With the fixed qparams of a bounded result
        this would cut the input of a sigmoid to [0, 1), so the observer of the global QConfig, or a
        histogram, is used instead.
        """
        assert specs.activation is not None
        has_fixed_qparams = specs.activation_constructor.settings.has_fixed_qparams
        if not (has_fixed_qparams and _has_bounded_result(partition)):
            return specs.activation
        return self._general_spec(specs.activation_dtype)

    def _general_spec(self, dtype: torch.dtype | None = None) -> QuantizationSpec:
        """Return the activation spec of the global QConfig if it is static and of ``dtype``, else a
        histogram's.
        """
        general = OpSpecs(self.rules.global_qconfig) if self.rules.global_qconfig else None
        if general and general.is_static and general.activation and dtype in (None, general.activation_dtype):
            return general.activation
        histogram = HistogramObserver.with_args(dtype=dtype or torch.quint8)
        return make_spec(translate_constructor(histogram))

    def _observe_input(self, producer: Node, node: Node, spec: QuantizationSpec) -> None:
        edge = (producer, node)
        if edge in self.observed:
            return
        if self.dtype_of.get(producer) == spec.dtype and not spec.is_dynamic:
            return
        settings = spec.observer_or_fake_quant_ctr.settings
        for other, other_spec in self.edges_from.setdefault(producer, []):
            # FX's test of an observer that can be shared: equal class and dtype.
            if other_spec.observer_or_fake_quant_ctr.settings == settings:
                self.observed.join(edge, other)
                return
        check_axis(settings, producer.meta["val"].dim(), f"the input {producer.name!r} of {node.name!r}")
        self.observed.observe(edge, spec)
        self.edges_from[producer].append((edge, spec))

    def _share_with_input(self, pattern: FusedPattern, specs: OpSpecs) -> tuple[Action, str]:
        partition, output = pattern.observed_partition, pattern.last.output
        assert output is not None
        if not partition.inputs:
            return Action.FLOAT, "it has no float input to share an observer with"
        if not specs.reuses_input:
            if specs.activation is None:
                return Action.FLOAT, "its qconfig quantizes no activations"
            for producer, node in partition.inputs:
                self._observe_input(producer, node, self._input_spec(partition, specs))
        sources, dtypes = zip(
            *(self._source(producer, node) for producer, node in partition.inputs), strict=True
        )
        first = sources[0]
        if first is None:
            return self._follow_opaque_call(pattern, specs, set(dtypes))
        own = self._spec_beside_fixed(pattern, specs, first, sources[1:])
        if own is not None:
            self.observed.observe(output, own)
            self.dtype_of[output] = own.dtype
            return Action.QUANTIZED, "the fixed qparams of its input do not hold its result"
        for source in sources[1:]:
            if source is None:
                continue
            if source in self.shared and not self.observed.use_one(source, first):
                self.joins_shared.add(output)
            self.observed.share(source, first)
        self.observed.share(output, first)
        self.shared.add(output)
        self.dtype_of[output] = self.observed.dtype_at(first) or specs.activation_dtype
        return Action.SHARED, "its output shares the observer of its first input"

    def _spec_beside_fixed(
        self,
        pattern: FusedPattern,
        specs: OpSpecs,
        first: annotation.EdgeOrNode,
        others: Iterable[annotation.EdgeOrNode | None],
    ) -> QuantizationSpec | None:
        """Return the spec of a result that the fixed qparams of the ``first`` input do not hold, as those of
        a sigmoid times 8, or of a sigmoid joined with other values; else None."""
        kept = self._fixed_at(first)
        if kept is None or specs.activation is None:
            return None
        partition, last = pattern.observed_partition, pattern.last
        if any(source is None or self._fixed_at(source) != kept for source in others):
            assert last.output is not None
            self.joins_fixed.add(last.output)
            return self._general_spec(specs.activation_dtype)
        schema = getattr(partition.nodes[0].target, "_schema", None)
        has_operands = schema is not None and any(item.name == "other" for item in schema.arguments)
        if partition.tensor_count != 1 or not has_operands:
            return None
        settings = self.observed.spec_at(first).observer_or_fake_quant_ctr.settings
        computed = _qparams_behind((*partition.nodes, *last.nodes), kept, settings)
        if computed is None:
            return self._general_spec(specs.activation_dtype)
        is_fake = settings.is_fake_quantize
        return make_spec(fixed_qparams_constructor(*computed, settings.dtype, fake_quantize=is_fake))

    def _fixed_at(self, source: annotation.EdgeOrNode) -> tuple[float, int] | None:
        """Return the fixed qparams that ``source`` is quantized with, or None."""
        constructor: Any = getattr(self.observed.spec_at(source), "observer_or_fake_quant_ctr", None)
        if constructor is None or not constructor.settings.has_fixed_qparams:
            return None
        limits = constructor.settings.limits
        return limits.fixed_scale, limits.fixed_zero_point

    def _source(self, producer: Node, node: Node) -> tuple[annotation.EdgeOrNode | None, torch.dtype | None]:
        """Return where an input is observed, or None, and the dtype it is quantized to, or None. Float ops
        that only move values may be in between.

        FX goes back through every op without an observer, including ops that compute.
        """
        while True:
            for edge_or_node in ((producer, node), producer):
                if edge_or_node in self.observed:
                    return edge_or_node, self.dtype_of.get(producer)
            if producer in self.dtype_of or (moved := moved_by(producer)) is None:
                return None, self.dtype_of.get(producer)
            producer, node = moved, producer

    def _is_observed_before(self, node: Node) -> bool:
        """Return whether FX finds an observer on its way back from ``node`` through every op."""
        while node.all_input_nodes:
            producer = node.all_input_nodes[0]
            if any(item in self.observed for item in (node, (producer, node), producer)):
                return True
            node = producer
        return node in self.observed

    def _follow_opaque_call(
        self, pattern: FusedPattern, specs: OpSpecs, dtypes: set[torch.dtype | None]
    ) -> tuple[Action, str]:
        """Decide about an op whose input comes from a custom module, perhaps quantized, with no observer to
        share. FX goes back through the module to the observer of its input, which has another range."""
        partition, output = pattern.observed_partition, pattern.last.output
        assert output is not None
        if dtypes == {None}:
            if specs.reuses_input:
                borrowed = self._is_observed_before(partition.inputs[0][0])
                self.quantized_in_fx_alone[output] = BORROWED_IN_FX if borrowed else LEFT_FLOAT_IN_FX
            return Action.FLOAT, ON_FLOATS
        dtype = next(d for d in dtypes if d is not None)
        if len(partition.inputs) == 1 and all(preserves_values(node) for node in partition.nodes):
            self.dtype_of[output] = dtype
            return Action.SHARED, "it returns the quantized values of a custom module unchanged"
        if specs.activation is None or specs.reuses_input:
            return Action.FLOAT, "it reuses the qparams of a custom module but changes the values"
        self.observed.observe(output, specs.activation)
        self.dtype_of[output] = specs.activation_dtype
        return Action.QUANTIZED, "its input is a custom module's output; its own output has its own observer"


SHARE = ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT


def _has_bounded_result(partition: SourcePartition) -> bool:
    """Return whether FX's default mappings give the result fixed qparams: sigmoid, tanh, softmax."""
    return any(kind in FIXED_QPARAMS_OP_TO_OBSERVER for kind in partition.origin.object_types)


def _qparams_behind(
    nodes: Iterable[Node], fixed: tuple[float, int], settings: Any
) -> tuple[float, int] | None:
    """Return the qparams of what ``nodes`` compute, one after the other, of every value that ``fixed`` stands
    for; None if they read anything else."""
    low, high = settings.quant_min, settings.quant_max
    values = (torch.arange(low, high + 1) - fixed[1]) * fixed[0]
    for node in dict.fromkeys(nodes):
        if len(node.all_input_nodes) != 1:
            return None
        args, kwargs = map_arg((node.args, node.kwargs), lambda _: values)  # noqa: B023
        values = node.target(*args, **kwargs)  # type: ignore[operator]
    least, most = min(0.0, float(values.min())), max(0.0, float(values.max()))
    scale = (most - least) / (high - low)
    return (scale, low - round(least / scale)) if 0 < scale < math.inf else None


def _is_quantized(dtype: torch.dtype | None) -> bool:
    return dtype is not None and (dtype is torch.float16 or is_integer(dtype))


def _beyond_the_range_in_fx(pattern: FusedPattern) -> UnlikeFx | None:
    """Return what FX does with weights in a part of the range of int8 that is not symmetric."""
    if not pattern.first.weights or pattern.selection.qconfig is None:
        return None
    settings = OpSpecs(pattern.selection.qconfig).weight_constructor.settings
    low, high = settings.quant_min, settings.quant_max
    if settings.is_fake_quantize or settings.declared_dtype is not torch.qint8 or low is None or high is None:
        return None
    if low == -high or (low, high) == dtype_range(torch.int8):
        return None
    return UnlikeFx.of("TQ510", low=low, high=high, largest=high + 1)


def _infinite_value(pattern: FusedPattern) -> str | None:
    """Return a name for an input or the result of ``pattern`` with values that mean infinity, or None."""
    for producer, _ in pattern.observed_partition.inputs:
        if metadata.INFINITE.is_on(producer):
            return f"its input {producer.name!r}"
    output = pattern.last.output
    return "its result" if output is not None and metadata.INFINITE.is_on(output) else None
