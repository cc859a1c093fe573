"""Use only per-tensor q-dq around opaque modules, for export: backends have no per-channel activations.

An opaque module whose result is concatenated from pieces with different qparams, say of two directions,
returns it as integers with per-channel qparams. If an exported program shows the qparams
of the pieces inside the module, the module can as well return floats: the numbers are the same.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, replace

from torch.fx import Graph, GraphModule, Node

from torchq_compat.opaque_calls.insert_calls import opaque_call_nodes, tensor_arguments
from torchq_compat.opaque_calls.opaque_module import OpaqueModule
from torchq_compat.qspecs.qdq import DEQUANTIZE_PER_CHANNEL
from torchq_compat.qspecs.qparams import PerChannelQParams, QParams
from torchq_compat.support import metadata

__all__ = ["with_per_tensor_edges"]


@dataclass(frozen=True)
class _Edge:
    """A flat result or input of an opaque call."""

    call: Node
    position: int


def with_per_tensor_edges(converted: GraphModule) -> GraphModule:
    """Return a copy of ``converted`` with floats instead of per-channel integers between opaque modules and
    the graph. The copy shares the weights; ``converted`` is not changed."""
    graph = _copy_of(converted.graph)
    edited = GraphModule(converted, graph)
    opaque_modules = {call: _opaque_module(edited, call) for call in opaque_call_nodes(edited)}
    results: list[_Edge] = []
    inputs: list[_Edge] = []
    for call, opaque in opaque_modules.items():
        for getitem in call.users if opaque.opaque_shows_result_qparams else ():
            position = getitem.args[1]
            assert isinstance(position, int)
            readers = _readers(getitem, opaque_modules)
            if isinstance(metadata.INTEGERS.of(getitem), PerChannelQParams) and readers is not None:
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


def _opaque_module(graph_module: GraphModule, call: Node) -> OpaqueModule:
    opaque = graph_module.get_submodule(str(call.target))
    assert isinstance(opaque, OpaqueModule)
    return opaque


def _readers(getitem: Node, opaque_modules: dict[Node, OpaqueModule]) -> list[_Edge] | None:
    """Return the inputs of opaque calls that read ``getitem`` as integers; None if an op other than
    dequantize reads it as well."""
    edges: list[_Edge] = []
    for user in getitem.users:
        if user in opaque_modules and _takes_floats(opaque_modules[user]):
            arguments = tensor_arguments(user, opaque_modules[user])
            edges.extend(_Edge(user, index) for index, node in enumerate(arguments) if node is getitem)
        elif user.target is not DEQUANTIZE_PER_CHANNEL:
            return None
    return edges


def _takes_floats(opaque: OpaqueModule) -> bool:
    """Return whether ``opaque``, or a copy of it, computes the same from floats as from integers."""
    return type(opaque).opaque_receive is OpaqueModule.opaque_receive and not isinstance(opaque, GraphModule)


def _bypass_dequantize(getitem: Node) -> None:
    for user in list(getitem.users):
        if user.target is DEQUANTIZE_PER_CHANNEL:
            user.replace_all_uses_with(getitem)


def _hand_over_floats(graph_module: GraphModule, results: list[_Edge], inputs: list[_Edge]) -> None:
    """Give the opaque modules of these edges copies that accept and return floats there."""
    for path in {str(edge.call.target) for edge in (*results, *inputs)}:
        opaque = copy.copy(graph_module.get_submodule(path))
        assert isinstance(opaque, OpaqueModule)
        graph_module.set_submodule(path, opaque)
        for call in opaque_call_nodes(graph_module):
            index = call.kwargs["opaque_layout"]
            if call.target == path and isinstance(index, int):
                _set_floats(
                    opaque,
                    index,
                    [edge.position for edge in inputs if edge.call is call],
                    [edge.position for edge in results if edge.call is call],
                )


def _set_floats(opaque: OpaqueModule, index: int, inputs: list[int], outputs: list[int]) -> None:
    """Mark these positions of call ``index`` as floats."""
    layout = opaque.opaque_layouts[index]
    opaque.opaque_set_qparams(
        index, _without(layout.input_qparams, inputs), _without(layout.output_qparams, outputs)
    )
    if inputs:
        lying_on = tuple(
            each if position in inputs else None for position, each in enumerate(layout.input_qparams)
        )
        opaque.opaque_layouts[index] = replace(opaque.opaque_layouts[index], float_qparams=lying_on)


def _without(all_qparams: tuple[QParams | None, ...], positions: list[int]) -> tuple[QParams | None, ...]:
    return tuple(None if position in positions else qparams for position, qparams in enumerate(all_qparams))
