"""The quantized boundary of converted opaque modules, as in FX.

Inputs: the dequantize in front of each input is bypassed, so that the module receives integers. Outputs: each
used result leaves as integers, followed by one dequantize, and its consumers do not quantize it again. An
opaque module that feeds another passes its integers on directly. The call's layout has the qparams.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from torchq_compat.opaque_calls.insert_calls import opaque_call_nodes, tensor_arguments
from torchq_compat.opaque_calls.opaque_module import OpaqueModule
from torchq_compat.qspecs.qdq import DEQUANTIZE, QUANTIZE, constants_in, insert_dequantize, integers_behind
from torchq_compat.qspecs.qparams import PerTensorQParams, QParams
from torchq_compat.support import metadata

__all__ = ["qparams_of_integers", "quantize_boundaries", "refresh_boundaries"]

TO_DTYPE = torch.ops.aten.to.dtype


@dataclass(frozen=True)
class _Input:
    """An argument of an opaque call: the node to pass, and the qparams of its integers; None for floats."""

    node: Node
    qparams: QParams | None


def quantize_boundaries(graph_module: GraphModule) -> None:
    """Make the calls of all opaque modules in a converted graph pass and return integers."""
    for call in opaque_call_nodes(graph_module):
        module = graph_module.get_submodule(str(call.target))
        assert isinstance(module, OpaqueModule)
        inputs = [_decide_input(arg) for arg in tensor_arguments(call, module)]
        output_qparams = module.opaque_output_qparams(call.meta["val"])
        _apply(graph_module, call, module, inputs, output_qparams)
    graph_module.graph.eliminate_dead_code()


def refresh_boundaries(graph_module: GraphModule) -> None:
    """Update the qparams of all boundaries after new qparams were loaded into the graph and its cells."""
    for call in opaque_call_nodes(graph_module):
        module = graph_module.get_submodule(str(call.target))
        assert isinstance(module, OpaqueModule)
        output_qparams = module.opaque_output_qparams(call.meta["val"])
        index = call.kwargs["opaque_layout"]
        assert isinstance(index, int)
        input_qparams = tuple(qparams_of_integers(arg) for arg in tensor_arguments(call, module))
        module.opaque_set_qparams(index, input_qparams, output_qparams)
        for getitem in call.users:
            position = getitem.args[1]
            assert isinstance(position, int)
            metadata.INTEGERS.write(getitem, output_qparams[position])


def qparams_of_integers(arg: Node) -> QParams | None:
    """Return the qparams of the integers that ``arg`` returns, as a quantize node or a result of an opaque
    module; None for floats."""
    if arg.target is QUANTIZE:
        return PerTensorQParams.of_node(arg)
    return metadata.INTEGERS.of(arg)


def _decide_input(arg: Node) -> _Input:
    if arg.target is TO_DTYPE and isinstance(arg.args[0], Node) and arg.args[0].target is DEQUANTIZE:
        arg = arg.args[0]
    if metadata.DEQUANTIZED.is_on(arg):
        return _Input(integers_behind(arg), metadata.DEQUANTIZED.required(arg))
    if arg.target is DEQUANTIZE:
        return _Input(integers_behind(arg), PerTensorQParams.of_node(arg))
    return _Input(arg, None)


def _apply(
    graph_module: GraphModule,
    call: Node,
    module: OpaqueModule,
    inputs: list[_Input],
    output_qparams: tuple[QParams | None, ...],
) -> None:
    call.args = (*(entry.node for entry in inputs), *call.args[len(inputs) :])
    index = call.kwargs["opaque_layout"]
    assert isinstance(index, int)
    module.opaque_set_qparams(index, tuple(entry.qparams for entry in inputs), output_qparams)
    for getitem in list(call.users):
        position = getitem.args[1]
        assert isinstance(position, int)
        qparams = output_qparams[position]
        if qparams is not None:
            _insert_dequantize(graph_module, getitem, qparams)


def _insert_dequantize(graph_module: GraphModule, getitem: Node, qparams: QParams) -> None:
    graph = graph_module.graph
    value = getitem.meta["val"]
    with graph.inserting_before(getitem.next):
        dequantize = insert_dequantize(graph, getitem, qparams, constants_in(graph_module), value.dtype)
    dequantize.meta = {**getitem.meta, metadata.DEQUANTIZED.name: qparams}
    metadata.INTEGERS.write(getitem, qparams)
    with value.fake_mode:
        getitem.meta["val"] = value.to(qparams.dtype)
    getitem.replace_all_uses_with(dequantize, delete_user_cb=lambda user: user is not dequantize)
