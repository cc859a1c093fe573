"""The quantized boundary of converted opaque modules, as in FX.

Inputs: the dequantize in front of each input is bypassed, so that the module receives integers. Outputs: each
used result leaves as integers, followed by one dequantize, and its consumers do not quantize it again. An
opaque module that feeds another passes its integers on directly. The call's layout has the qparams.
"""

import torch
from torch.fx import GraphModule, Node

from torchq_compat.capture.opaque_calls import layout_index, opaque_call_nodes, tensor_arguments
from torchq_compat.read.qdq import DEQUANTIZE, DEQUANTIZES, QUANTIZE, constants_in, insert_dequantize
from torchq_compat.read.qparams import PerTensorQParams, QParams
from torchq_compat.support import metadata
from torchq_compat.support.graph_nodes import position_of, source_of

TO_DTYPE = torch.ops.aten.to.dtype


def quantize_boundaries(graph_module: GraphModule) -> None:
    """Make the calls of all opaque modules in a converted graph pass and return integers."""
    for call, module in opaque_call_nodes(graph_module).items():
        inputs = [_decide_input(arg) for arg in tensor_arguments(call, module)]
        call.args = (*(node for node, _ in inputs), *call.args[len(inputs) :])
        output_qparams = module.opaque_output_qparams(call.meta["val"])
        input_qparams = tuple(qparams for _, qparams in inputs)
        module.opaque_set_qparams(layout_index(call), input_qparams, output_qparams)
        for getitem in list(call.users):
            if (qparams := output_qparams[position_of(getitem)]) is not None:
                _insert_dequantize(graph_module, getitem, qparams)
    graph_module.graph.eliminate_dead_code()


def refresh_boundaries(graph_module: GraphModule) -> None:
    """Update the qparams of all boundaries after new qparams were loaded into the graph and its cells."""
    for call, module in opaque_call_nodes(graph_module).items():
        output_qparams = module.opaque_output_qparams(call.meta["val"])
        input_qparams = tuple(qparams_of_integers(arg) for arg in tensor_arguments(call, module))
        module.opaque_set_qparams(layout_index(call), input_qparams, output_qparams)
        for getitem in call.users:
            metadata.INTEGERS.write(getitem, output_qparams[position_of(getitem)])


def qparams_of_integers(arg: Node) -> QParams | None:
    """Return the qparams of the integers that ``arg`` returns, as a quantize node or a result of an opaque
    module; None for floats."""
    return PerTensorQParams.of_call(arg, QUANTIZE) or metadata.INTEGERS.of(arg)


def _decide_input(arg: Node) -> tuple[Node, QParams | None]:
    """Return the node to pass in place of ``arg``, and the qparams of its integers; None for floats."""
    if arg.target is TO_DTYPE and isinstance(arg.args[0], Node) and arg.args[0].target is DEQUANTIZE:
        arg = arg.args[0]
    if arg.target not in DEQUANTIZES:
        return arg, None
    source = source_of(arg)
    qparams = metadata.INTEGERS.of(source) or PerTensorQParams.of_call(arg, DEQUANTIZE)
    return (arg, None) if qparams is None else (source, qparams)


def _insert_dequantize(graph_module: GraphModule, getitem: Node, qparams: QParams) -> None:
    graph = graph_module.graph
    value = getitem.meta["val"]
    with graph.inserting_before(getitem.next):
        dequantize = insert_dequantize(graph, getitem, qparams, constants_in(graph_module), value.dtype)
    dequantize.meta = dict(getitem.meta)
    metadata.INTEGERS.write(getitem, qparams)
    with value.fake_mode:
        getitem.meta["val"] = value.to(qparams.dtype)
    getitem.replace_all_uses_with(dequantize, delete_user_cb=lambda user: user is not dequantize)
