"""Per-tensor q-dq alone at the edges of leaf modules, for export: backends know no per-channel activations.

A leaf whose result is put together from pieces on different grids, say two directions, hands it out as
integers with a grid for each channel. Where it shows the grids of the pieces itself, it may as well hand out
floats: the numbers are the same.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from torchq_compat.graph import metadata
from torchq_compat.opaque_calls.insert_calls import leaf_nodes, tensor_arguments
from torchq_compat.opaque_calls.opaque_module import LeafModule
from torchq_compat.qspecs.qparams import Grid, PerChannelGrid

__all__ = ["with_per_tensor_edges"]

DEQUANTIZE_PER_CHANNEL = torch.ops.quantized_decomposed.dequantize_per_channel.default


@dataclass(frozen=True)
class _Edge:
    """A flat result or input of a leaf call."""

    call: Node
    position: int


def with_per_tensor_edges(converted: GraphModule) -> GraphModule:
    """``converted``, which stays as it is, with floats for per-channel integers between leaves and the graph.
    Weights are shared."""
    graph = _copy_of(converted.graph)
    edited = GraphModule(converted, graph)
    leaves = {call: _leaf(edited, call) for call in leaf_nodes(edited)}
    results: list[_Edge] = []
    inputs: list[_Edge] = []
    for call, leaf in leaves.items():
        for getitem in call.users if leaf.leaf_results_on_grids else ():
            position = getitem.args[1]
            assert isinstance(position, int)
            readers = _readers(getitem, leaves)
            if isinstance(metadata.INTEGERS.of(getitem), PerChannelGrid) and readers is not None:
                results.append(_Edge(call, position))
                inputs.extend(readers)
                _bypass_dequantize(getitem)
    _hand_over_floats(edited, results, inputs)
    graph.eliminate_dead_code()
    return GraphModule(edited, graph)


def _copy_of(graph: Graph) -> Graph:
    with warnings.catch_warnings():
        # Copying the TreeSpecs of an exported graph warns about torch's own pytree code.
        warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
        return copy.deepcopy(graph)


def _leaf(graph_module: GraphModule, call: Node) -> LeafModule:
    leaf = graph_module.get_submodule(str(call.target))
    assert isinstance(leaf, LeafModule)
    return leaf


def _readers(getitem: Node, leaves: dict[Node, LeafModule]) -> list[_Edge] | None:
    """The leaf inputs that read ``getitem`` as integers; None if something else but dequantize does."""
    edges: list[_Edge] = []
    for user in getitem.users:
        if user in leaves and _takes_floats(leaves[user]):
            arguments = tensor_arguments(user, leaves[user])
            edges.extend(_Edge(user, index) for index, node in enumerate(arguments) if node is getitem)
        elif user.target is not DEQUANTIZE_PER_CHANNEL:
            return None
    return edges


def _takes_floats(leaf: LeafModule) -> bool:
    """Whether ``leaf``, or a copy of it, would get the same floats for integers."""
    return type(leaf).leaf_receive is LeafModule.leaf_receive and not isinstance(leaf, GraphModule)


def _bypass_dequantize(getitem: Node) -> None:
    for user in list(getitem.users):
        if user.target is DEQUANTIZE_PER_CHANNEL:
            user.replace_all_uses_with(getitem)


def _hand_over_floats(graph_module: GraphModule, results: list[_Edge], inputs: list[_Edge]) -> None:
    """Give the leaves of these edges copies that take and hand out floats there."""
    for path in {str(edge.call.target) for edge in (*results, *inputs)}:
        leaf = copy.copy(graph_module.get_submodule(path))
        assert isinstance(leaf, LeafModule)
        graph_module.set_submodule(path, leaf)
        for call in leaf_nodes(graph_module):
            index = call.kwargs["leaf_layout"]
            if call.target == path and isinstance(index, int):
                layout = leaf.leaf_layouts[index]
                leaf.leaf_set_grids(
                    index,
                    _without(layout.input_grids, [edge.position for edge in inputs if edge.call is call]),
                    _without(layout.output_grids, [edge.position for edge in results if edge.call is call]),
                )


def _without(grids: tuple[Grid | None, ...], positions: list[int]) -> tuple[Grid | None, ...]:
    return tuple(None if position in positions else grid for position, grid in enumerate(grids))
