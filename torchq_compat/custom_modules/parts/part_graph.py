"""A graph of parts: a module exported once, with nodes named after the parts, which prepare finds by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Self

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.quantizer import SharedQuantizationSpec

from torchq_compat.annotate.annotation import NodeSpecs
from torchq_compat.custom_modules.parts.part import Part, PartKind
from torchq_compat.custom_modules.parts.part_specs import PartSpecs
from torchq_compat.graph.observed_graph import convert_graph, prepare_graph
from torchq_compat.graph.qparams_state import qparams_state, set_qparams_state
from torchq_compat.qspecs.observed_sqnr import typical_sqnr
from torchq_compat.qspecs.qdq import DEQUANTIZE
from torchq_compat.qspecs.qparams import PerTensorQParams
from torchq_compat.qspecs.saturation import saturated_share
from torchq_compat.support import metadata
from torchq_compat.support.graph_nodes import module_path_of

__all__ = [
    "ConvertedPartGraphModule",
    "PartGraphModule",
    "convert_parts",
    "converted_qparams",
    "measured_parts",
    "part_nodes",
    "part_of",
    "prepare_parts",
    "saturated_parts",
]


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
        return _decide(graph_module, specs, input_dtypes)

    return prepare_graph(captured, decide, is_qat=False)


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
    return metadata.PART.required(node)


def converted_qparams(graph_module: GraphModule) -> tuple[PerTensorQParams | None, ...]:
    """Return the qparams of each output of a converted graph: those of the dequantize that computes it."""
    output = graph_module.graph.output_node()
    results = output.args[0]
    assert isinstance(results, (tuple, list))
    return tuple(_qparams_of(node) for node in results if isinstance(node, Node))


def _qparams_of(node: Node) -> PerTensorQParams | None:
    if node.target is not DEQUANTIZE:
        return None
    return PerTensorQParams.of_node(node)


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


def _decide(
    graph_module: GraphModule, specs: PartSpecs, input_dtypes: Mapping[str, torch.dtype]
) -> dict[Node, NodeSpecs]:
    first_reader: dict[Node, Node] = {}
    decided: dict[Node, NodeSpecs] = {}
    for _, node in part_nodes(graph_module):
        part = part_of(node)
        node_specs = NodeSpecs(output=specs.output_spec(part))
        source = node.args[0]
        assert isinstance(source, Node)
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


def _dtype_of(node: Node, specs: PartSpecs, input_dtypes: Mapping[str, torch.dtype]) -> torch.dtype | None:
    """Return the quantized dtype of ``node``, an input of the graph or another part that a linear reads; None
    for floats."""
    if node.op == "placeholder":
        return input_dtypes.get(str(node.target))
    return specs.output_constructor(part_of(node)).settings.dtype if metadata.PART.is_on(node) else None
