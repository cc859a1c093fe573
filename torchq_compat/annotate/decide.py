"""Decide, op by op in graph order, what is observed; no node is changed here.

FX's rules: an op with a QConfig and a matching backend pattern has its inputs observed, unless the producer
already yields that dtype, and its output observed, with an observer of its own or with that of its first
input. An op without stays float.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.ao.quantization import HistogramObserver
from torch.ao.quantization.backend_config import ObservationType
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.quantizer import QuantizationSpec

from torchq_compat.annotate.annotation import NodeSpecs
from torchq_compat.annotate.call_boundary import LeafBoundary
from torchq_compat.annotate.dtype_rules import find_dtype_config, is_half_static, refusal, takes_weight
from torchq_compat.annotate.fused_patterns import Chain, find_chains
from torchq_compat.annotate.observed_edges import Slot, Slots
from torchq_compat.annotate.op_records import OpRecord
from torchq_compat.annotate.order_rules import decide_order_rules
from torchq_compat.annotate.passthrough_ops import preserves_values
from torchq_compat.annotate.source_partitions import OpGroup, find_groups
from torchq_compat.config.backend_configs import BackendTable, PatternEntry
from torchq_compat.config.qconfig_mappings import QConfigRules
from torchq_compat.qspecs.contradictions import check_axis
from torchq_compat.qspecs.dtypes import is_integer
from torchq_compat.qspecs.observers import translate_constructor
from torchq_compat.qspecs.quantization_specs import OpSpecs, make_spec
from torchq_compat.support.decisions import Action, Decision
from torchq_compat.support.upstream import FIXED_QPARAMS_OP_TO_OBSERVER

__all__ = ["GraphDecisions", "decide_graph"]

#: Ops that hand values on without computing: not reported, never observed.
SILENT_TARGETS = {"getitem", "sym_size.int"}


@dataclass(frozen=True)
class GraphDecisions:
    """The specs to write, the decisions to show, and what each op is to a QConfigMapping."""

    specs: dict[Node, NodeSpecs]
    decisions: tuple[Decision, ...]
    records: tuple[tuple[Node, OpRecord], ...]


def decide_graph(
    graph_module: GraphModule,
    model: nn.Module | None,
    rules: QConfigRules,
    backend: BackendTable,
    leaves: Mapping[Node, LeafBoundary],
    quantized_inputs: Iterable[Node] = (),
    quantized_outputs: Iterable[tuple[Node, Node]] = (),
) -> GraphDecisions:
    """Decide for every op of ``graph_module``.

    Args:
        graph_module: the captured model, custom modules as leaf calls.
        model: what was exported, if it is at hand.
        rules: the QConfigMapping.
        backend: the BackendConfig.
        leaves: the boundary of each leaf call.
        quantized_inputs: placeholders that will take integers.
        quantized_outputs: (node, output node) of results that will be returned as integers.

    Raises:
        ConfigError: QConfigs that conflict in a fused pattern, or whose settings contradict each other.
    """
    groups = find_groups(graph_module, model)
    state = _State(rules, backend)
    state.decisions.extend(decide_order_rules(groups, rules))
    chains = {chain.first.nodes[-1]: chain for chain in find_chains(groups, rules, backend)}
    for node in quantized_inputs:
        state.take_quantized_input(node)
    for node in graph_module.graph.nodes:
        if node in leaves:
            state.take_leaf(node, leaves[node])
        elif node in chains:
            state.take_chain(chains[node])
    for edge in quantized_outputs:
        state.take_quantized_output(*edge)
    records = tuple(
        (node, chain.record) for chain in chains.values() for op in chain.ops for node in op.nodes
    )
    specs = state.slots.node_specs(graph_module.graph.nodes)
    return GraphDecisions(specs, tuple(state.decisions), records)


@dataclass
class _State:
    rules: QConfigRules
    backend: BackendTable
    slots: Slots = field(default_factory=Slots)
    decisions: list[Decision] = field(default_factory=list)
    #: The quantized dtype a node's value has for its consumers.
    dtype_of: dict[Node, torch.dtype] = field(default_factory=dict)
    #: Edges already observed, by producer: consumers that want the same share one observer.
    edges_from: dict[Node, list[tuple[Slot, QuantizationSpec]]] = field(default_factory=dict)

    def take_leaf(self, node: Node, boundary: LeafBoundary) -> None:
        for producer, spec in zip(node.args, boundary.input_specs, strict=False):
            assert isinstance(producer, Node)
            if spec is None or not _is_float(producer):
                continue
            if self.dtype_of.get(producer) not in boundary.accepted:
                self._observe_input(producer, node, spec)
        for getitem in node.users:
            position = getitem.args[1]
            assert isinstance(position, int)
            self._take_leaf_output(getitem, position, boundary)

    def _take_leaf_output(self, getitem: Node, position: int, boundary: LeafBoundary) -> None:
        dtype, spec = boundary.output_dtypes[position], boundary.output_specs[position]
        if dtype is not None:
            self.dtype_of[getitem] = dtype
        elif spec is not None and _is_float(getitem):
            self.slots.observe(getitem, spec)
            self.dtype_of[getitem] = spec.dtype

    def take_quantized_input(self, placeholder: Node) -> None:
        if _is_float(placeholder):
            spec = self._general_spec()
            self.slots.observe(placeholder, spec)
            self.dtype_of[placeholder] = spec.dtype

    def take_quantized_output(self, node: Node, output: Node) -> None:
        if _is_float(node) and node not in self.dtype_of:
            self._observe_input(node, output, self._general_spec())

    def take_chain(self, chain: Chain) -> None:
        group, last = chain.first, chain.last
        if group.kind in SILENT_TARGETS or (group.output is None and not group.inputs):
            return
        action, reason = self._decide(chain)
        kind = " + ".join(op.kind for op in chain.ops)
        node = last.output.name if last.output else ""
        self.decisions.append(Decision(group.label, kind, action, reason, node=node))

    def _decide(self, chain: Chain) -> tuple[Action, str]:
        entry, qconfig = chain.entry, chain.selection.qconfig
        if chain.first.origin.wrapped:
            return Action.FLOAT, "torch.fx.wrap makes it one float call, as in FX"
        if qconfig is None:
            return Action.FLOAT, f"its qconfig is None ({chain.selection.rule})"
        if chain.last.output is None:
            return Action.FLOAT, "it has no single float output that could be observed"
        if entry is None:
            return Action.FLOAT, f"the backend config {self.backend.name!r} has no pattern for it"
        return self._quantize(chain, entry, OpSpecs(qconfig))

    def _quantize(self, chain: Chain, entry: PatternEntry, specs: OpSpecs) -> tuple[Action, str]:
        """As far as the backend's row for it allows."""
        group = chain.observed_group
        if specs.reuses_input:
            return self._share_with_input(group, chain.last, specs)
        roles = {"has_weight": "weight" in group.parameters, "has_bias": "bias" in group.parameters}
        config = find_dtype_config(entry, specs, **roles)
        if config is None:
            return Action.FLOAT, refusal(entry, specs, **roles)
        if entry.observation_for(group.tensor_count) is SHARE and chain.observes_inputs:
            return self._share_with_input(group, chain.last, specs)
        is_module = group.origin.is_module_call
        quantize_weight = takes_weight(entry, specs) if is_module else _is_quantized(config.weight_dtype)
        self._observe_op(group, chain.last, specs, quantize_weight=quantize_weight)
        if not is_module and is_half_static(specs):
            self._round_bias(group, specs)
        return Action.QUANTIZED, f"qconfig from {chain.selection.rule}"

    def _observe_op(self, group: OpGroup, last: OpGroup, specs: OpSpecs, *, quantize_weight: bool) -> None:
        activation = specs.activation
        if activation is not None:
            for producer, node in group.inputs:
                self._observe_input(producer, node, self._input_spec(group, specs))
        if quantize_weight and specs.weight is not None:
            for weight, node in group.weights:
                spec = specs.weight if weight.op == "get_attr" else specs.computed_weight
                axis_of = specs.weight_constructor.settings
                check_axis(axis_of, weight.meta["val"].dim(), f"the weight of {group.label!r}")
                self.slots.observe((weight, node), spec)
        if activation is not None and not specs.is_dynamic:
            assert last.output is not None
            self.slots.observe(last.output, activation)
            self.dtype_of[last.output] = specs.activation_dtype

    def _round_bias(self, group: OpGroup, specs: OpSpecs) -> None:
        """FX observes the bias of a function like its input; a module keeps its bias."""
        edge = group.parameters.get("bias")
        if edge is not None and specs.activation is not None:
            self.slots.observe(edge, specs.activation)

    def _input_spec(self, group: OpGroup, specs: OpSpecs) -> QuantizationSpec:
        """FX observes an input with the constructor of the output. For the fixed qparams of a bounded result
        that cuts the input of a sigmoid to [0, 1): the observer of the global QConfig is taken instead, or
        a histogram."""
        assert specs.activation is not None
        has_fixed_qparams = specs.activation_constructor.settings.has_fixed_qparams
        if not (has_fixed_qparams and _has_bounded_result(group)):
            return specs.activation
        return self._general_spec(specs.activation_dtype)

    def _general_spec(self, dtype: torch.dtype | None = None) -> QuantizationSpec:
        """The activation of the global QConfig, if it is static and of ``dtype``; or a histogram."""
        general = OpSpecs(self.rules.global_qconfig) if self.rules.global_qconfig else None
        if general and general.is_static and general.activation and dtype in (None, general.activation_dtype):
            return general.activation
        histogram = HistogramObserver.with_args(dtype=dtype or torch.quint8)
        return make_spec(translate_constructor(histogram))

    def _observe_input(self, producer: Node, node: Node, spec: QuantizationSpec) -> None:
        edge = (producer, node)
        if edge in self.slots:
            return
        if self.dtype_of.get(producer) == spec.dtype and not spec.is_dynamic:
            return
        for other, other_spec in self.edges_from.setdefault(producer, []):
            if _same_observer(spec, other_spec):
                self.slots.join(edge, other)
                return
        settings = spec.observer_or_fake_quant_ctr.settings
        check_axis(settings, producer.meta["val"].dim(), f"the input {producer.name!r} of {node.name!r}")
        self.slots.observe(edge, spec)
        self.edges_from[producer].append((edge, spec))

    def _share_with_input(self, group: OpGroup, last: OpGroup, specs: OpSpecs) -> tuple[Action, str]:
        assert last.output is not None
        if not group.inputs:
            return Action.FLOAT, "it has no float input to share an observer with"
        if not specs.reuses_input:
            if specs.activation is None:
                return Action.FLOAT, "its qconfig quantizes no activations"
            for producer, node in group.inputs:
                self._observe_input(producer, node, self._input_spec(group, specs))
        sources = [self._slot_of_input(producer, node) for producer, node in group.inputs]
        first = sources[0]
        dtypes = {self.dtype_of.get(producer) for producer, _ in group.inputs}
        if first is None:
            return self._follow_leaf(group, last, specs, dtypes)
        for source in sources[1:]:
            if source is not None:
                self.slots.share(source, first)
        self.slots.share(last.output, first)
        self.dtype_of[last.output] = self.slots.dtype_at(first) or specs.activation_dtype
        return Action.SHARED, "its output shares the observer of its first input"

    def _slot_of_input(self, producer: Node, node: Node) -> Slot | None:
        for slot in ((producer, node), producer):
            if slot in self.slots:
                return slot
        return None

    def _follow_leaf(
        self, group: OpGroup, last: OpGroup, specs: OpSpecs, dtypes: set[torch.dtype | None]
    ) -> tuple[Action, str]:
        """The input comes from a custom module, already quantized, with no observer to share. FX traces
        back through the module and takes the observer of its input, which has another range."""
        assert last.output is not None
        if dtypes == {None}:
            return Action.FLOAT, "it reuses the qparams of its input, which is float"
        dtype = next(d for d in dtypes if d is not None)
        if len(group.inputs) == 1 and all(preserves_values(node) for node in group.nodes):
            self.dtype_of[last.output] = dtype
            return Action.SHARED, "it hands on the quantized values of a custom module unchanged"
        if specs.activation is None or specs.reuses_input:
            return Action.FLOAT, "it reuses the qparams of a custom module but changes the values"
        self.slots.observe(last.output, specs.activation)
        self.dtype_of[last.output] = specs.activation_dtype
        return Action.QUANTIZED, "its input is a custom module's output; its own output is observed apart"


SHARE = ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT


def _is_float(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point


def _has_bounded_result(group: OpGroup) -> bool:
    """Whether FX's default mappings give it fixed qparams, for its result: sigmoid, tanh, softmax."""
    return any(kind in FIXED_QPARAMS_OP_TO_OBSERVER for kind in group.origin.object_types)


def _is_quantized(dtype: torch.dtype | None) -> bool:
    return dtype is not None and (dtype is torch.float16 or is_integer(dtype))


def _same_observer(a: QuantizationSpec, b: QuantizationSpec) -> bool:
    """FX's test for reusing an observer another consumer already has: same class, same dtype."""
    mine, other = a.observer_or_fake_quant_ctr.settings, b.observer_or_fake_quant_ctr.settings
    return bool(mine == other)
