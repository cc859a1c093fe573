"""Writes decisions into a graph in the form that torchao's prepare reads."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, Quantizer, SharedQuantizationSpec
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY, QuantizationSpecBase

from torchq_compat.capture.origins import Origin
from torchq_compat.ops import draws, moved_by
from torchq_compat.read import qconfig_mappings
from torchq_compat.support import metadata
from torchq_compat.support.graph_nodes import attribute_of


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


def annotating_nothing() -> SpecQuantizer:
    """Return a Quantizer that leaves every op as it is."""
    return SpecQuantizer(lambda _: {})


# Observed edges and nodes of a graph, and which of them share an observer.
#
# An edge leads into a node; a node means its output. Edges and nodes that share use one observer, as FX
# makes all inputs and the output of ``cat`` use the observer of its first input.


#: A node for its output, (producer, consumer) for an edge: torchao's EdgeOrNode.
EdgeOrNode = Node | tuple[Node, Node]


class ObservedEdges:
    """Specs by edge or node, and which of them share an observer."""

    def __init__(self) -> None:
        self._specs: dict[EdgeOrNode, QuantizationSpecBase] = {}
        #: Edge -> the first edge from the same node, if FX routes both through one observer node.
        self._joined_with: dict[EdgeOrNode, EdgeOrNode] = {}
        #: Edge or node -> the edge or node whose observer it uses; itself if it has its own.
        self._observer: dict[EdgeOrNode, EdgeOrNode] = {}

    def __contains__(self, edge_or_node: EdgeOrNode) -> bool:
        return self._first(edge_or_node) in self._observer

    def observe(self, edge_or_node: EdgeOrNode, spec: QuantizationSpecBase) -> None:
        """Give ``edge_or_node`` an observer of its own, made from ``spec``."""
        self._specs[edge_or_node] = spec
        self._observer[edge_or_node] = edge_or_node

    def join(self, edge: EdgeOrNode, other: EdgeOrNode) -> None:
        """Make ``edge`` always use the observer of ``other``, an edge from the same node: if one of them
        later shares the observer of something else, so does the other."""
        self._joined_with[edge] = self._first(other)

    def share(self, edge_or_node: EdgeOrNode, leader: EdgeOrNode) -> None:
        """Make ``edge_or_node`` use the observer of ``leader``. As in FX this changes only ``edge_or_node``
        and the edges joined with it: edges and nodes that share its old observer keep that one."""
        self._observer[self._first(edge_or_node)] = self._observer[self._first(leader)]

    def use_one(self, edge_or_node: EdgeOrNode, other: EdgeOrNode) -> bool:
        """Return whether ``edge_or_node`` and ``other`` use one observer."""
        return self._observer[self._first(edge_or_node)] == self._observer[self._first(other)]

    def spec_at(self, edge_or_node: EdgeOrNode) -> QuantizationSpecBase:
        """Return the spec of the observer of ``edge_or_node``."""
        return self._specs[self._observer[self._first(edge_or_node)]]

    def dtype_at(self, edge_or_node: EdgeOrNode) -> torch.dtype | None:
        """Return the dtype that the observer of ``edge_or_node`` quantizes to, or None."""
        return getattr(self.spec_at(edge_or_node), "dtype", None)

    def node_specs(self, nodes: Iterable[Node]) -> dict[Node, NodeSpecs]:
        """Return the specs in torchao's form: the first edge or node of an observer has the spec, and the
        others refer to it. torchao makes observers in graph order, for the edges of a node before its
        output."""
        decided: dict[Node, NodeSpecs] = {}
        first_with: dict[EdgeOrNode, EdgeOrNode] = {}

        def spec_of(edge_or_node: EdgeOrNode) -> QuantizationSpecBase:
            observer = self._observer[self._first(edge_or_node)]
            first = first_with.setdefault(observer, edge_or_node)
            return self._specs[observer] if first == edge_or_node else SharedQuantizationSpec(first)

        for node in nodes:
            specs = NodeSpecs()
            for producer in node.all_input_nodes:
                if (producer, node) in self:
                    specs.inputs[producer] = spec_of((producer, node))
            if node in self:
                specs.output = spec_of(node)
            if specs:
                decided[node] = specs
        return decided

    def _first(self, edge_or_node: EdgeOrNode) -> EdgeOrNode:
        return self._joined_with.get(edge_or_node, edge_or_node)


# Records on nodes how a QConfigMapping selects their op, so that convert can apply another mapping to it.


@dataclass(frozen=True)
class OpRecord:
    """An op, or the op of a fused pattern whose QConfig applies to the pattern.

    Attributes:
        label: the path in the decision about the op.
        origin: the origin of the op.
        call_index: how many calls of the same type the same module made before.
    """

    label: str
    origin: Origin
    call_index: int

    def select(self, rules: qconfig_mappings.QConfigRules) -> qconfig_mappings.Selection:
        """Return the QConfig that ``rules`` give the op."""
        origin = self.origin
        if origin.is_module_call:
            return qconfig_mappings.select_for_module(
                rules, origin.module_type, origin.module_path, self.call_index
            )
        return qconfig_mappings.select_for_function(
            rules, origin.object_types, origin.module_type, origin.module_path, self.call_index
        )


def module_record(module_type: type[nn.Module], path: str) -> OpRecord:
    """Return the record of a module that is one call in the graph."""
    return OpRecord(path, Origin(path, path, module_type, (module_type,), is_module_call=True), 0)


def write_op_records(records: Iterable[tuple[Node, OpRecord]]) -> None:
    """Put each record on its node."""
    for node, record in records:
        metadata.OP.write(node, record)


def op_record(node: Node) -> OpRecord | None:
    """Return the record that prepare wrote on ``node``; None if the node is no op of the model."""
    return metadata.OP.of(node)


# Quantizers that wrap another Quantizer.


class WrappingQuantizer(Quantizer):  # type: ignore[misc]
    """A base class of Quantizers that forwards every call of torchao's prepare to ``quantizer``."""

    def __init__(self, quantizer: Quantizer) -> None:
        super().__init__()
        self.quantizer = quantizer

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        transformed: GraphModule | None = self.quantizer.transform_for_annotation(model)
        return model if transformed is None else transformed

    def annotate(self, model: GraphModule) -> GraphModule:
        annotated: GraphModule | None = self.quantizer.annotate(model)
        # torchao continues with the graph it passed; some Quantizers return None.
        return model if annotated is None else annotated

    def validate(self, model: GraphModule) -> None:
        self.quantizer.validate(model)

    def prepare_obs_or_fq_callback(self, model: GraphModule, observers: dict[Any, Any]) -> None:
        self.quantizer.prepare_obs_or_fq_callback(model, observers)


class OuterGraphQuantizer(WrappingQuantizer):
    """A Quantizer that annotates only the outer graph, for which torchao calls it first.

    torchao then calls it for the bodies of scans and while loops, which stay float: observers in them cannot
    run during training, and cannot be converted.
    """

    def prepare_obs_or_fq_callback(self, model: GraphModule, observers: dict[Any, Any]) -> None:
        super().prepare_obs_or_fq_callback(model, observers)
        self.quantizer = annotating_nothing()


# Ops that update a buffer from its own old value, like a counter or a moving average: they stay float.
#
# On 8 bits such a buffer would stop at the end of the calibrated range, or wherever an increment is smaller
# than half a step: FX keeps the steps of ``x`` for ``0.01 * x``. A state that goes through a weight or a
# gate, as in a hand-written recurrent cell, is data.


ATEN = torch.ops.aten
COPY = ATEN.copy_.default


def buffer_updates(graph_module: GraphModule) -> dict[Node, str]:
    """Return the ops that update a buffer from its old value -> the name of the buffer.

    They are the op whose result is written, if it reads the old value or what is computed from it and
    constants alone, the ops on the way from the old value, those that only move the result, and those that
    compute increments for nothing else.
    """
    updates: dict[Node, str] = {}
    attributes = _attributes_alone(graph_module)
    for write in graph_module.graph.find_nodes(op="call_function", target=COPY):
        buffer, value = write.args[0], write.args[1]
        if not isinstance(buffer, Node) or buffer.op != "get_attr" or not isinstance(value, Node):
            continue
        name = str(buffer.target)
        *moves, value = _moves_to(value)
        way = [value] if value in attributes else value.all_input_nodes
        way = [node for node in way if name in attributes.get(node, ())]
        if not way or value.op != "call_function":
            continue
        updates.update(dict.fromkeys((value, *moves), name))
        while way:
            node = way.pop()
            if node is value or node not in updates:
                updates[node] = name
                way.extend(producer for producer in node.all_input_nodes if name in attributes[producer])
        _add_increments(value, name, updates)
    return updates


def _add_increments(value: Node, name: str, updates: dict[Node, str]) -> None:
    """Add to ``updates`` the ops that compute for ``value`` alone, back to those with weights."""
    increments = list(value.all_input_nodes)
    while increments:
        node = increments.pop()
        is_only_for_it = node.op == "call_function" and all(user in updates for user in node.users)
        if node not in updates and is_only_for_it and all(n.op != "get_attr" for n in node.all_input_nodes):
            updates[node] = name
            increments.extend(node.all_input_nodes)


def _moves_to(node: Node) -> list[Node]:
    """Return ``node`` and what it moves or copies, back to the node that computes the values."""
    result = [node]
    while True:
        source = result[-1].args[1] if result[-1].target is ATEN.copy.default else moved_by(result[-1])
        if not isinstance(source, Node):
            return result
        result.append(source)


def _attributes_alone(graph_module: GraphModule) -> dict[Node, frozenset[str]]:
    """Return the nodes that read no input of the model -> the names of the attributes they read."""
    alone: dict[Node, frozenset[str]] = {}
    for node in graph_module.graph.nodes:
        given = node.all_input_nodes
        if node.op == "get_attr":
            alone[node] = frozenset((str(node.target),))
        elif node.op == "call_function" and given and all(item in alone for item in given):
            alone[node] = frozenset().union(*(alone[entry] for entry in given))
    return alone


# Ops that compute with sizes and constants alone: grids, positions, rotary angles. They stay float.
#
# FX evaluates what is made of buffers while it traces, and does not observe what is made of sizes. The
# values often have a wide range, and a sine or an inverse behind them that needs all their digits.
# Parameters are data: they are trained, and FX quantizes the ops that read them.


#: Reads a size, whatever the tensor holds.
SIZE = ATEN.sym_size.int


def find_constants(graph_module: GraphModule) -> frozenset[Node]:
    """Return the nodes whose values depend on sizes, buffers that are not written, and literals alone."""
    copies = graph_module.graph.find_nodes(op="call_function", target=ATEN.copy_.default)
    written = {copy.args[0].target for copy in copies}
    constants: set[Node] = set()
    for node in graph_module.graph.find_nodes(op="get_attr"):
        value = attribute_of(graph_module, node)
        if node.target not in written and isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            constants.add(node)
    for node in graph_module.graph.nodes:
        is_computed = not draws(node) and constants.issuperset(node.all_input_nodes)
        if node.op == "call_function" and (node.target is SIZE or is_computed):
            constants.add(node)
    return frozenset(constants)
