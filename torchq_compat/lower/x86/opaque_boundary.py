"""Drop superfluous q-dq nodes around opaque calls whose modules quantize floats themselves.

A module that accepts and returns floats quantizes its float inputs, takes the integers of a quantized
producer, and returns integers to a quantized consumer. Only nodes that compute something remain.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Graph, Node

from torchq_compat.opaque_calls.opaque_module import OpaqueModule
from torchq_compat.qspecs.qparams import PerTensorQParams, QParams
from torchq_compat.support.dtypes import dtype_range
from torchq_compat.support.quantized_tensors import DEQUANTIZE_OP as DEQUANTIZE
from torchq_compat.support.quantized_tensors import QUANTIZE_OP as QUANTIZE

__all__ = ["simplify_boundaries"]

ATEN = torch.ops.aten
LEGACY_DTYPES = {torch.uint8: torch.quint8, torch.int8: torch.qint8}


def simplify_boundaries(graph: Graph, modules: dict[str, OpaqueModule], carried: Collection[Node]) -> None:
    """Drop the nodes around calls of ``modules`` (path -> module) that these modules make superfluous.

    Args:
        carried: nodes that only move data and run on quantized tensors as on floats.
    """
    for call in [node for node in graph.nodes if node.op == "call_module"]:
        module = modules.get(str(call.target))
        if module is None or not module.leaf_quantizes:
            continue
        layout = module.opaque_layouts[_layout_of(call)]
        _simplify_inputs(call, layout.input_qparams)
        _simplify_results(graph, call, layout.output_qparams, carried)


def _layout_of(call: Node) -> int:
    index = call.kwargs["opaque_layout"]
    assert isinstance(index, int)
    return index


def _simplify_inputs(call: Node, all_qparams: tuple[QParams | None, ...]) -> None:
    args = list(call.args)
    for index, (arg, qparams) in enumerate(zip(args, all_qparams, strict=False)):
        if not isinstance(arg, Node) or arg.target is not DEQUANTIZE or not _has_integers(qparams):
            continue
        (quantized,) = arg.args
        assert isinstance(quantized, Node)
        alone = len(quantized.users) == 1 and len(arg.users) == 1
        args[index] = quantized.args[0] if alone and _quantizes(quantized, qparams) else quantized
    call.args = tuple(args)


def _simplify_results(
    graph: Graph, call: Node, all_qparams: tuple[QParams | None, ...], carried: Collection[Node]
) -> None:
    handed: list[int] = []
    for getitem in list(call.users):
        position = getitem.args[1]
        assert isinstance(position, int)
        qparams = all_qparams[position] if all_qparams else None
        asked = [user for user in getitem.users if _quantizes(user, qparams)]
        for quantize in asked:
            ends = _ends_in_floats(quantize, carried)
            if ends is not None:
                quantize.replace_all_uses_with(getitem)
                for dequantize in ends:
                    (source,) = dequantize.args
                    assert isinstance(source, Node)
                    dequantize.replace_all_uses_with(source)
        asked = [quantize for quantize in asked if quantize.users]
        if asked:
            handed.append(position)
            _hand_integers(graph, getitem, asked)
    if handed:
        call.kwargs = {**call.kwargs, "leaf_quantized": tuple(sorted(handed))}


def _hand_integers(graph: Graph, getitem: Node, asked: list[Node]) -> None:
    """Make ``getitem`` quantized, in place of the nodes ``asked``; other readers get it dequantized."""
    in_floats = [user for user in getitem.users if user not in asked]
    if in_floats:
        with graph.inserting_after(getitem):
            floats = graph.call_function(DEQUANTIZE, (getitem,))
        floats.meta = dict(getitem.meta)
        for user in in_floats:
            user.replace_input_with(getitem, floats)
    for quantize in asked:
        quantize.replace_all_uses_with(getitem)
        graph.erase_node(quantize)


def _ends_in_floats(quantize: Node, carried: Collection[Node]) -> list[Node] | None:
    """Return the dequantizes after ``quantize``, if only ops that move data are between; else None."""
    ends: list[Node] = []
    for user in quantize.users:
        if user.target is DEQUANTIZE:
            ends.append(user)
            continue
        behind = (
            _ends_in_floats(user, carried) if user in carried and len(user.all_input_nodes) == 1 else None
        )
        if behind is None:
            return None
        ends += behind
    return ends


def _quantizes(node: Node, qparams: QParams | None) -> bool:
    """Return whether ``node`` quantizes with ``qparams``."""
    if node.target is not QUANTIZE or not isinstance(qparams, PerTensorQParams):
        return False
    written: Any = (qparams.scale, qparams.zero_point, LEGACY_DTYPES.get(qparams.dtype))
    return node.args[1:] == written and (qparams.quant_min, qparams.quant_max) == dtype_range(qparams.dtype)


def _has_integers(qparams: QParams | None) -> bool:
    return isinstance(qparams, PerTensorQParams) and qparams.dtype in LEGACY_DTYPES
