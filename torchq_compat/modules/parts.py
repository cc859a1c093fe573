"""Custom modules that consist of parts: graphs whose ops are observed one by one, by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.quantizer import QuantizationSpec, SharedQuantizationSpec

from torchq_compat.annotate.annotation import NodeSpecs, SpecQuantizer
from torchq_compat.annotate.observed_graph import convert_graph, prepare_graph
from torchq_compat.capture.call_layouts import CallLayout, input_labels
from torchq_compat.capture.opaque_calls import OpaqueModule
from torchq_compat.errors import ConfigError
from torchq_compat.model.state import qparams_state, set_qparams_state
from torchq_compat.read import observers
from torchq_compat.read.backend_configs import BackendTable
from torchq_compat.read.observer_classes import saturated_share, typical_sqnr
from torchq_compat.read.qdq import DEQUANTIZE
from torchq_compat.read.qparams import PerTensorQParams, QParams
from torchq_compat.read.qspecs import OpSpecs, make_spec
from torchq_compat.support import metadata
from torchq_compat.support.dtypes import as_dtype, dtype_name, dtype_range, is_integer, plain_dtype
from torchq_compat.support.graph_nodes import copied_values, module_path_of, source_of
from torchq_compat.support.quantized_tensors import as_float
from torchq_compat.support.upstream import pytree

# Float32 copies of a float module's parameters, which leave the originals unchanged.


def own_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return a float32 Linear with copies of ``weight`` and ``bias``."""
    out_features, in_features = weight.shape
    linear = nn.Linear(in_features, out_features, bias=bias is not None, device="meta")
    linear.weight = own_parameter(weight)
    if bias is not None:
        linear.bias = own_parameter(bias)
    return linear


def own_parameter(values: Tensor) -> nn.Parameter:
    """Return a float32 parameter with a copy of ``values``."""
    return nn.Parameter(copied_values(values).float(), requires_grad=values.requires_grad)


# A part: one op inside a custom module that is observed on its own.


class PartKind(Enum):
    """The operation of a part, which decides its default observer and its pattern in a BackendConfig."""

    LINEAR = "linear"
    ADD = "add"
    MUL = "mul"
    SIGMOID = "sigmoid"
    TANH = "tanh"
    RELU = "relu"
    COMPLEMENT = "complement"
    IDENTITY = "identity"


@dataclass(frozen=True)
class Part:
    """One op of a cell.

    Attributes:
        name: path of the op inside the module that is exported.
        kind: the operation; decides the default observer.
        group: the group whose constructor makes its output observer.
        formula: what it computes, for messages.
        input_group: the group whose constructor, if given, observes its input separately from the producer's
            output.
        covers: the gates it computes at once; with split gates, each gate has its own part.
    """

    name: str
    kind: PartKind
    group: str
    formula: str
    input_group: str | None = None
    covers: tuple[str, ...] = ()


class ObservedValue(nn.Module):
    """A part of kind ``PartKind.IDENTITY``: gives its input a node of its own, which can be observed."""

    def forward(self, x: Tensor) -> Tensor:
        alias: Tensor = torch.ops.aten.alias.default(x)
        return alias


# The constructors that observe the parts of a module: those given for groups, and the defaults.


@dataclass(frozen=True)
class PartSpecs:
    """The specs of every edge of a graph of parts, from one QConfig and the user's constructors.

    Attributes:
        op_specs: the specs of the module's QConfig.
        constructors: the user's constructors by group of parts; groups left out follow the QConfig.
    """

    op_specs: OpSpecs
    constructors: Mapping[str, observers.ObserverConstructor] = field(default_factory=dict)

    def output_constructor(self, part: Part) -> observers.ObserverConstructor:
        """Return the constructor that observes the output of ``part``.

        Default: the QConfig's activation. Sigmoid, its complement and tanh have FX's fixed qparams, which
        divide [0, 1) and [-1, 1) by the number of integers of the dtype: scales 1/256 and 2/256 for 8 bits.
        """
        if (given := self.constructors.get(part.group)) is not None:
            return given
        is_bounded = part.kind in (PartKind.SIGMOID, PartKind.COMPLEMENT, PartKind.TANH)
        if is_bounded and is_integer(self.op_specs.activation_dtype):
            return self._fixed_constructor(part.kind)
        return self.op_specs.activation_constructor

    def output_spec(self, part: Part) -> QuantizationSpec | None:
        """Return the spec for the output of ``part``; None if it stays float, because its constructor has a
        float dtype."""
        return _spec_of_integers(self.output_constructor(part))

    def input_spec(self, part: Part) -> QuantizationSpec | None:
        """Return the spec for the input of ``part`` if it is observed separately from its producer's output;
        else None."""
        given = self.constructors.get(part.input_group or "")
        return None if given is None else _spec_of_integers(given)

    def linear_input_spec(self, input_dtype: torch.dtype | None) -> QuantizationSpec | None:
        """Return the spec for the input of a linear: None if it has the QConfig's activation dtype already;
        else it is quantized again."""
        if input_dtype == self.op_specs.activation_dtype:
            return None
        return self.op_specs.activation

    def group_dtype(self, group: str) -> torch.dtype:
        """Return the dtype of the parts of ``group``, which is a float dtype if they stay float."""
        given = self.constructors.get(group)
        return given.settings.dtype if given is not None else self.op_specs.activation_dtype

    def weight_spec(self) -> QuantizationSpec | None:
        given = self.constructors.get("weight")
        if given is None:
            return self.op_specs.weight
        return make_spec(given if given.settings.is_fake_quantize else observers.WeightConstructor(given))

    def _fixed_constructor(self, kind: PartKind) -> observers.ObserverConstructor:
        activation = self.op_specs.activation_constructor.settings
        low, high = dtype_range(activation.dtype)
        levels = high - low + 1
        scale, zero_point = (2 / levels, low + levels // 2) if kind is PartKind.TANH else (1 / levels, low)
        return observers.fixed_qparams_constructor(
            scale, zero_point, activation.dtype, fake_quantize=activation.is_fake_quantize
        )


def _spec_of_integers(constructor: observers.ObserverConstructor) -> QuantizationSpec | None:
    return make_spec(constructor) if is_integer(constructor.settings.dtype) else None


class DynamicPartSpecs(PartSpecs):
    """The specs of a dynamic QConfig: linears quantize their inputs at run time; nothing else is quantized.

    Like ``torch.ao.nn.quantized.dynamic``, where float16 means half-precision weights and float activations.
    """

    def output_spec(self, part: Part) -> QuantizationSpec | None:
        return None

    def input_spec(self, part: Part) -> QuantizationSpec | None:
        return None

    def linear_input_spec(self, input_dtype: torch.dtype | None) -> QuantizationSpec | None:
        return self.op_specs.activation if is_integer(self.op_specs.activation_dtype) else None


# Checks that a BackendConfig allows the dtypes in which parts are observed.
#
# FX checked a part's dtype only if its own prepare inserted the observer, and silently ignored the
# constructor of a sigmoid if the config did not list its dtype.


PATTERN: dict[PartKind, Callable[..., Any]] = {
    PartKind.LINEAR: nn.Linear,
    PartKind.ADD: torch.add,
    PartKind.MUL: torch.mul,
    PartKind.SIGMOID: nn.Sigmoid,
    PartKind.TANH: nn.Tanh,
    PartKind.RELU: nn.ReLU,
    PartKind.IDENTITY: nn.Identity,
    # No BackendConfig has a pattern for 1 - a, which is an add with a constant.
    PartKind.COMPLEMENT: torch.add,
}


def check_part_dtypes(parts: Sequence[Part], specs: PartSpecs, backend: BackendTable) -> None:
    """Check the output dtype of every part that is quantized.

    Raises:
        ConfigError: if no static DTypeConfig of the part's operation lists the dtype; names the part.
    """
    for part in parts:
        pattern = PATTERN[part.kind]
        entry = backend.find((pattern,))
        allowed = {
            plain_dtype(config.output_dtype)
            for config in (entry.dtype_configs if entry else ())
            if config.output_dtype is not None and not config.is_dynamic
        }
        dtype = specs.output_constructor(part).settings.dtype
        if is_integer(dtype) and dtype not in allowed:
            kind, named = pattern.__name__, dtype_name(dtype)
            names = ", ".join(sorted(map(dtype_name, allowed))) or "nothing"
            raise ConfigError.of("TQ911.part_dtype", part=part.name, dtype=named, pattern=kind, allowed=names)


# A graph of parts: a module exported once, with nodes named after the parts, which prepare finds by name.


def prepare_parts(
    captured: GraphModule,
    parts: Sequence[Part],
    specs: PartSpecs,
    input_dtypes: Mapping[str, torch.dtype],
    *,
    prefix: str = "",
) -> GraphModule:
    """Insert the observers of ``parts`` into ``captured``, the graph of a module, which is changed.

    Args:
        input_dtypes: the quantized dtype of each input, by its name in ``forward``.
        prefix: the path, with a final dot, from the module to the one in which the part names are paths.
    """
    _name_nodes_after_parts(captured, {f"{prefix}{part.name}": part for part in parts})

    def decide(graph_module: GraphModule) -> dict[Node, NodeSpecs]:
        first_reader: dict[Node, Node] = {}
        decided: dict[Node, NodeSpecs] = {}
        for _, node in part_nodes(graph_module):
            part = part_of(node)
            node_specs = NodeSpecs(output=specs.output_spec(part))
            source = source_of(node)
            if part.kind is PartKind.LINEAR:
                input_spec = specs.linear_input_spec(_dtype_of(source, specs, input_dtypes))
                weight, weight_spec = node.args[1], specs.weight_spec()
                assert isinstance(weight, Node)
                if weight_spec is not None:
                    node_specs.inputs[weight] = weight_spec
            else:
                input_spec = specs.input_spec(part)
            if input_spec is not None:
                reader = first_reader.setdefault(source, node)
                node_specs.inputs[source] = (
                    input_spec if reader is node else SharedQuantizationSpec((source, reader))
                )
            decided[node] = node_specs
        return decided

    return prepare_graph(captured, SpecQuantizer(decide))


class PartGraphModule(GraphModule):
    """A prepared graph of parts."""

    @classmethod
    def wrap(cls, graph_module: GraphModule) -> Self:
        wrapped = cls(graph_module, graph_module.graph)
        wrapped.meta.update(graph_module.meta)
        return wrapped


class ConvertedPartGraphModule(PartGraphModule):
    """A q-dq graph of parts; its state_dict contains all qparams."""

    def get_extra_state(self) -> Tensor:
        return qparams_state(self)

    def set_extra_state(self, state: Tensor) -> None:
        """Set the qparams of the graph, see ``set_qparams_state``."""
        set_qparams_state(self, state)


def convert_parts(prepared: GraphModule) -> GraphModule:
    """Convert a prepared graph to q-dq with int8 weights folded. Changes ``prepared``: pass a copy."""
    saturation, measured = dict(saturated_parts(prepared)), dict(measured_parts(prepared))
    converted = convert_graph(prepared)
    metadata.OBSERVED_SQNR.write(converted, measured)
    metadata.SATURATION.write(converted, saturation)
    return converted


def saturated_parts(graph_module: GraphModule) -> Iterator[tuple[str, float]]:
    """Yield (part name, share of its calibration values outside its observer's range), for observers that
    count it."""
    noted = metadata.SATURATION.of(graph_module)
    yield from noted.items() if noted is not None else _of_observers(graph_module, saturated_share)


def measured_parts(graph_module: GraphModule) -> Iterator[tuple[str, float]]:
    """Yield (part name, dB of a typical value over the rounding noise), for observers with a histogram."""
    noted = metadata.OBSERVED_SQNR.of(graph_module)
    yield from noted.items() if noted is not None else _of_observers(graph_module, typical_sqnr)


def _of_observers(
    graph_module: GraphModule, measure: Callable[[nn.Module], float | None]
) -> Iterator[tuple[str, float]]:
    for name, node in part_nodes(graph_module):
        for user in node.users:
            if user.op == "call_module":
                measured = measure(graph_module.get_submodule(str(user.target)))
                if measured is not None:
                    yield name, measured


def part_nodes(graph_module: GraphModule) -> Iterator[tuple[str, Node]]:
    """Yield (part name, node) of a prepared or converted graph, in the order of computation."""
    for node in graph_module.graph.nodes:
        if metadata.PART.is_on(node) and node.op == "call_function":
            yield part_of(node).name, node


def part_of(node: Node) -> Part:
    """Return the part that ``node`` computes."""
    part: Part = metadata.PART.required(node)
    return part


def converted_qparams(graph_module: GraphModule) -> tuple[PerTensorQParams | None, ...]:
    """Return the qparams of each output of a converted graph: those of the dequantize that computes it."""
    results = graph_module.graph.output_node().args[0]
    assert isinstance(results, (tuple, list))
    return tuple(PerTensorQParams.of_call(node, DEQUANTIZE) for node in results if isinstance(node, Node))


def _name_nodes_after_parts(graph_module: GraphModule, by_path: Mapping[str, Part]) -> None:
    last_of: dict[str, Node] = {}
    for node in graph_module.graph.nodes:
        path = module_path_of(node)
        if node.op == "call_function" and path in by_path:
            last_of[path] = node
    for path, node in last_of.items():
        metadata.PART.write(node, by_path[path])
        node._rename(by_path[path].name.replace(".", "_"))
    graph_module.recompile()


def _dtype_of(node: Node, specs: PartSpecs, input_dtypes: Mapping[str, torch.dtype]) -> torch.dtype | None:
    """Return the quantized dtype of ``node``, an input of the graph or another part that a linear reads; None
    for floats."""
    if node.op == "placeholder":
        return input_dtypes.get(str(node.target))
    return specs.output_constructor(part_of(node)).settings.dtype if metadata.PART.is_on(node) else None


# The base class of the package's own custom modules, which consist of graphs of parts.


class PartOwner(OpaqueModule, ABC):
    """An observed or converted module that consists of prepared or converted graphs.

    Attributes:
        specs: the specs of the parts.
        module_path: the module's path in the model, for messages.
    """

    #: A float class, if the arguments of its ``forward`` are the graphs' inputs, by name.
    inputs_named_as: ClassVar[type[nn.Module] | None] = None
    #: The paths of the graphs that compute the results of a call, in their order.
    graphs_of_results: ClassVar[tuple[str, ...]] = ()
    #: Whether the graphs run on integers: they take them for the inputs in ``integer_inputs``, by name, and
    #: return them for the results that have qparams in ``integer_results``.
    is_lowered = False
    integer_inputs: Mapping[str, PerTensorQParams] = MappingProxyType({})
    integer_results: tuple[QParams | None, ...] = ()
    specs: PartSpecs
    qconfig: Any
    module_path: str

    def __init__(self) -> None:
        # Not super().__init__: the legacy classes would make float layers with random weights.
        nn.Module.__init__(self)
        self.module_path = ""
        self.opaque_layouts: list[CallLayout] = []

    def forward(self, *args: Any, opaque_layout: int | None = None, **kwargs: Any) -> Any:
        """Run a call. The caller may be a user's quantized module, which may pass quantized tensors of
        torch.ao."""
        if opaque_layout is None:
            args, kwargs = pytree.tree_map_only(Tensor, as_float, (args, kwargs))
        return super().forward(*args, opaque_layout=opaque_layout, **kwargs)

    @abstractmethod
    def graphs(self) -> Iterator[tuple[str, GraphModule]]:
        """Yield (path inside the module, graph of parts)."""

    @abstractmethod
    def result_dtypes(self, count: int) -> tuple[torch.dtype | None, ...]:
        """Return the quantized dtype of each of the ``count`` flat results of a call; None for floats."""

    def layouts_of_integers(self, names: Collection[str]) -> list[CallLayout]:
        """Return the layouts of the calls if the inputs ``names`` are not dequantized in front of a call."""
        assert self.inputs_named_as is not None
        result = []
        for layout in self.opaque_layouts:
            labels = input_labels(self.inputs_named_as, layout.inputs)
            pairs = zip(labels, layout.input_qparams, strict=bool(layout.input_qparams))
            inputs = tuple(None if label in names else qparams for label, qparams in pairs)
            result.append(replace(layout, input_qparams=inputs))
        return result

    def named_input_qparams(self) -> dict[str, PerTensorQParams]:
        """Return the qparams of the graphs' inputs, by name, for inputs that have the same known qparams in
        every call."""
        if self.inputs_named_as is None:
            return {}
        matches: dict[str, set[QParams | None]] = {}
        for layout in self.opaque_layouts:
            labels = input_labels(self.inputs_named_as, layout.inputs)
            for label, qparams in zip(labels, layout.input_qparams, strict=bool(layout.input_qparams)):
                matches.setdefault(label, set()).add(qparams)
        single = {label: all_qparams.pop() for label, all_qparams in matches.items() if len(all_qparams) == 1}
        return {label: qparams for label, qparams in single.items() if isinstance(qparams, PerTensorQParams)}

    def opaque_hand_out(self, result: Tensor, qparams: QParams | None) -> Tensor:
        return super().opaque_hand_out(result, qparams) if result.is_floating_point() else result

    def as_graphs_take(self, name: str, value: Tensor) -> Tensor:
        """Return the argument ``name``, floats or integers, as the graphs take it."""
        if not value.is_floating_point():
            return value
        qparams = self.integer_inputs.get(name)
        return as_dtype(value, torch.float32) if qparams is None else qparams.quantize(value)

    def in_floats(self, index: int, result: Tensor) -> Tensor:
        """Return the result ``index`` of the graphs in floats."""
        qparams = None if result.is_floating_point() else self.integer_results[index]
        return result if qparams is None else qparams.dequantize(result)

    def observed_by(self, specs: PartSpecs, *, training: bool) -> Self:
        """Return this module, whose parts are observed by ``specs``, in the mode of the float module."""
        self.specs = specs
        self.qconfig = specs.op_specs.qconfig
        return self.train(training)

    def take_over(self, other: PartOwner) -> None:
        """Take over the specs, path, layouts and mode of ``other``, which this module replaces."""
        self.specs = other.specs
        self.module_path = other.module_path
        self.opaque_layouts = list(other.opaque_layouts)
        self.train(other.training)
