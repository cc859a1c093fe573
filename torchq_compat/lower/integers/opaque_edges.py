"""Hand floats to and from modules that round them to their qparams themselves, where nothing reads integers.

A lowered recurrent module takes floats or integers, and returns floats on the steps of their qparams, or
integers where ``leaf_quantized`` asks for them: a quantize before it or a dequantize behind it would only
take time.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from torch.fx import Graph, Node

from torchq_compat.lower.integers.lowered_graph import is_signed, numbers_of
from torchq_compat.lower.integers.operators import DEQUANTIZE, QUANTIZE
from torchq_compat.opaque_calls.opaque_module import OpaqueModule
from torchq_compat.qspecs import qdq
from torchq_compat.qspecs.qparams import PerTensorQParams, QParams

__all__ = ["hand_over_floats"]

IN_FLOATS = (DEQUANTIZE, qdq.DEQUANTIZE, qdq.DEQUANTIZE_PER_CHANNEL)


def hand_over_floats(
    graph: Graph, modules: Mapping[str, OpaqueModule], stands_for: MutableMapping[Node, Any]
) -> None:
    """Drop the conversions around calls of ``modules`` (path -> module) that the modules make superfluous.

    Args:
        stands_for: see ``Rewriter``; kept up to date.
    """
    calls = {
        node: module
        for node in graph.find_nodes(op="call_module")
        if (module := modules.get(str(node.target))) is not None and module.leaf_quantizes
    }
    for call, module in calls.items():
        layout = module.opaque_layouts[_index(call)]
        pairs = zip(call.args, layout.input_qparams, strict=False)
        given = [_before_quantize(arg, qparams) for arg, qparams in pairs]
        call.args = (*given, *call.args[len(given) :])
        asked = []
        for result in list(call.users):
            position = result.args[1]
            assert isinstance(position, int)
            readers = [user for user in result.users if user.target not in IN_FLOATS]
            if readers and layout.output_qparams and layout.output_qparams[position] is not None:
                asked.append(position)
                continue
            for dequantize in list(result.users):
                if dequantize not in readers:
                    stands_for[result] = stands_for[dequantize]
                    dequantize.replace_all_uses_with(result, propagate_meta=False)
                    graph.erase_node(dequantize)
        if asked:
            call.kwargs = {**call.kwargs, "leaf_quantized": tuple(sorted(asked))}


def _index(call: Node) -> int:
    index = call.kwargs["opaque_layout"]
    assert isinstance(index, int)
    return index


def _before_quantize(arg: object, qparams: QParams | None) -> object:
    """Return the floats that ``arg`` quantizes with ``qparams`` for one call alone; else ``arg``."""
    if not isinstance(arg, Node) or arg.target is not QUANTIZE or len(arg.users) > 1:
        return arg
    is_same = isinstance(qparams, PerTensorQParams) and arg.args[1:] == (
        *numbers_of(qparams),
        is_signed(qparams),
    )
    return arg.args[0] if is_same else arg
