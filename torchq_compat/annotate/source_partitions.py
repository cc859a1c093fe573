"""Source partitions: the nodes of an exported graph that would be one node in FX.

A torch.nn module may export to several aten nodes; FX quantizes it as one op, at its inputs and output.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from torchq_compat.annotate.op_parameters import NORMALIZATIONS, parameter_nodes, parameters_of, weight_of
from torchq_compat.capture.origins import Origin, find_origin

__all__ = ["SourcePartition", "find_source_partitions", "is_float_tensor"]


@dataclass(frozen=True)
class SourcePartition:
    """One op as FX saw it.

    Attributes:
        nodes: its nodes in order.
        origin: its origin.
        inputs: (producer, consumer in the partition) of every float activation that enters.
        weights: (producer, consumer) of the weights that a QConfig can quantize.
        parameters: "weight", "bias" -> (producer, consumer); empty for a module.
        tensor_count: how many positional arguments of the first node are float tensors, repeated ones
            included.
        output: the node whose value leaves; None if several do, or the value is no float tensor.
        call_index: how many calls of the same type the same module made before.
    """

    nodes: tuple[Node, ...]
    origin: Origin
    inputs: tuple[tuple[Node, Node], ...]
    weights: tuple[tuple[Node, Node], ...]
    parameters: Mapping[str, tuple[Node, Node]]
    tensor_count: int
    output: Node | None
    call_index: int

    @property
    def caller(self) -> str:
        """The path of the module whose code makes the call."""
        return _caller(self.origin)

    @property
    def label(self) -> str:
        """The module path for a module, ``scope/node`` for a function."""
        if self.origin.is_module_call:
            return self.origin.module_path
        return (
            f"{self.origin.module_path}/{self.nodes[-1].name}"
            if self.origin.module_path
            else self.nodes[-1].name
        )

    @property
    def kind(self) -> str:
        if self.origin.is_module_call:
            return self.origin.module_type.__name__
        if self.origin.wrapped:
            return self.origin.wrapped
        target = self.nodes[-1].target
        return target if isinstance(target, str) else getattr(target, "__name__", str(target))

    def with_roles(self, input_type_to_index: Mapping[str, int]) -> SourcePartition:
        """Return the partition with the roles that a BackendConfig gives to the arguments of a function: an
        argument without a role is an activation. The partition of a module is unchanged."""
        if self.origin.is_module_call:
            return self
        parameters = {name: edge for name, edge in self.parameters.items() if name in input_type_to_index}
        inputs = [*self.inputs, *(edge for name, edge in self.parameters.items() if name not in parameters)]
        node = self.nodes[0]
        for name, index in input_type_to_index.items():
            named = node.args[index] if index < len(node.args) else None
            if not self.parameters and isinstance(named, Node) and (named, node) in inputs:
                parameters[name] = (named, node)
                inputs.remove((named, node))
        has_weight = "weight" in parameters and node.target not in NORMALIZATIONS
        weights = (parameters["weight"],) if has_weight else ()
        return replace(self, inputs=tuple(inputs), weights=weights, parameters=parameters)


def find_source_partitions(graph_module: GraphModule, model: nn.Module | None) -> list[SourcePartition]:
    """Return the source partitions of ``graph_module`` in graph order; ``model`` is the exported module, or
    None if only the graph is known."""
    members: dict[str, list[Node]] = {}
    origins: dict[str, Origin] = {}
    for node in graph_module.graph.nodes:
        if node.op != "call_function" or "val" not in node.meta:
            continue
        origin = find_origin(node, model)
        members.setdefault(origin.call, []).append(node)
        origins[origin.call] = origin
    seen: Counter[tuple[str, object]] = Counter()
    partitions = []
    for call, nodes in members.items():
        caller = _caller_and_type(origins[call])
        partitions.append(_partition(tuple(nodes), origins[call], seen[caller]))
        seen[caller] += 1
    return partitions


def _caller_and_type(origin: Origin) -> tuple[str, object]:
    """Return the key by which module_name_object_type_order counts calls: the caller and the type called."""
    return _caller(origin), next(iter(origin.object_types), None)


def _caller(origin: Origin) -> str:
    return origin.module_path.rpartition(".")[0] if origin.is_module_call else origin.module_path


def is_float_tensor(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype.is_floating_point


def _is_size(node: Node) -> bool:
    return isinstance(node.meta.get("val"), (int, float, torch.SymInt, torch.SymFloat, torch.SymBool))


def _partition(nodes: tuple[Node, ...], origin: Origin, call_index: int) -> SourcePartition:
    inside = set(nodes)
    inputs: list[tuple[Node, Node]] = []
    weights: list[tuple[Node, Node]] = []
    for node in nodes:
        weight = weight_of(node)
        if weight is not None:
            weights.append((weight, node))
        for producer in _activations(node, origin):
            if producer not in inside and (producer, node) not in inputs:
                inputs.append((producer, node))
    # torch.export computes a size where it is first needed, perhaps within a module that it does not belong
    # to.
    leaving = [
        node for node in nodes if not _is_size(node) and any(user not in inside for user in node.users)
    ]
    output = leaving[0] if len(leaving) == 1 and is_float_tensor(leaving[0]) else None
    parameters = {} if origin.is_module_call else parameters_of(nodes[0])
    count = sum(is_float_tensor(arg) for arg in nodes[0].args if isinstance(arg, Node))
    return SourcePartition(
        nodes, origin, tuple(inputs), tuple(weights), parameters, count, output, call_index
    )


def _activations(node: Node, origin: Origin) -> list[Node]:
    parameters = parameter_nodes(node)
    return [
        producer
        for producer in _nodes_in_order(node)
        if producer not in parameters
        and is_float_tensor(producer)
        and not (origin.is_module_call and producer.op == "get_attr")
    ]


def _nodes_in_order(node: Node) -> list[Node]:
    found: list[Node] = []
    torch.fx.node.map_arg((node.args, node.kwargs), lambda n: found.append(n))
    return found
