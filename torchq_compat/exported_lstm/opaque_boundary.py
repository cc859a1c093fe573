"""The quantized boundary of an opaque recurrent module: q-dq around its calls, with the cells' qparams.

The cells already quantize their inputs and results with the same qparams, so the q-dq here changes no value:
it shows a backend what it may pass as integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule, Node

from torchq_compat.custom_modules.parts.part_graph import converted_qparams
from torchq_compat.exported_lstm.opaque import OpaqueRecurrent
from torchq_compat.qspecs.qdq import DEQUANTIZE, QUANTIZE, constants_in, insert_q_dq
from torchq_compat.qspecs.qparams import PerTensorQParams, QParams, combine_along
from torchq_compat.support.user_warnings import warn_user

__all__ = ["quantize_boundary"]

INPUTS, RESULTS = ("x", "h0", "c0"), ("output", "h_n", "c_n")


def quantize_boundary(graph_module: GraphModule, path: str, module: OpaqueRecurrent) -> None:
    """Insert q-dq around every call of ``module``, whose path is ``path``; warn about edges left float."""
    inputs, results = _input_qparams(module), _result_qparams(module)
    for call in [node for node in graph_module.graph.nodes if node.op == "call_module"]:
        if call.target == path:
            # By position: one tensor may be both states, each with its own qparams.
            call.args = tuple(
                _quantized_argument(graph_module, call, argument, qparams)
                for argument, qparams in zip(call.args, inputs, strict=True)
            )
            for getitem in list(call.users):
                position: Any = getitem.args[1]
                if results[position] is not None:
                    _insert_after(graph_module, getitem, results[position])
    graph_module.graph.eliminate_dead_code()
    graph_module.graph.lint()
    graph_module.recompile()
    count = len(inputs)
    names = INPUTS[:count] + RESULTS[:count]
    left = [name for name, qparams in zip(names, inputs + results, strict=True) if qparams is None]
    if left:
        warn_user(
            f"the boundary of {path!r} stays float at {', '.join(left)}: the quantizer did not quantize that "
            "edge of every cell, or not in one dtype."
        )


def _input_qparams(module: OpaqueRecurrent) -> tuple[QParams | None, ...]:
    first_layer = {_argument_qparams(direction.cell)[0] for direction in module.by_layer()[0]}
    x = first_layer.pop() if len(first_layer) == 1 else None
    _, *states = zip(*(_argument_qparams(direction.cell) for direction in module.directions()), strict=True)
    return x, *(_combine(0, state, 1) for state in states)


def _result_qparams(module: OpaqueRecurrent) -> tuple[QParams | None, ...]:
    output = [converted_qparams(direction.cell)[0] for direction in module.by_layer()[-1]]
    states = zip(*(converted_qparams(direction.cell) for direction in module.directions()), strict=True)
    return _combine(2, output, module.output_size), *(_combine(0, state, 1) for state in states)


def _argument_qparams(cell: GraphModule) -> tuple[PerTensorQParams | None, ...]:
    """Return the qparams with which a converted cell quantizes x and each state; None if it does not."""
    return tuple(_qparams_of_readers(node) for node in cell.graph.nodes if node.op == "placeholder")


def _qparams_of_readers(placeholder: Node) -> PerTensorQParams | None:
    all_qparams = {_qparams_of(user, QUANTIZE) for user in placeholder.users}
    return all_qparams.pop() if len(all_qparams) == 1 else None


def _qparams_of(node: Node, op: Any) -> PerTensorQParams | None:
    """Return the qparams of a call of ``op``, a per-tensor quantize or dequantize; None for any other
    node."""
    return PerTensorQParams.of_node(node) if node.target is op else None


def _combine(axis: int, all_qparams: Sequence[PerTensorQParams | None], size: int) -> QParams | None:
    known = [(qparams, size) for qparams in all_qparams if qparams is not None]
    return combine_along(axis, known) if len(known) == len(all_qparams) else None


def _quantized_argument(
    graph_module: GraphModule, call: Node, argument: Any, qparams: QParams | None
) -> Node:
    """Return q-dq of ``argument`` of ``call`` with ``qparams``, or ``argument`` if it has them already."""
    if qparams is None or _qparams_of(argument, DEQUANTIZE) == qparams:
        source: Node = argument
        return source
    return _insert(graph_module, argument, qparams, before=call)


def _insert_after(graph_module: GraphModule, node: Node, qparams: QParams) -> None:
    """Insert q-dq between ``node`` and its readers; bypass readers that quantize ``node`` with the same
    qparams."""
    readers = list(node.users)
    q_dq = _insert(graph_module, node, qparams, before=node.next)
    for reader in readers:
        reader.replace_input_with(node, q_dq)
        if _qparams_of(reader, QUANTIZE) == qparams:
            for dequantize in list(reader.users):
                dequantize.replace_all_uses_with(q_dq)


def _insert(graph_module: GraphModule, node: Node, qparams: QParams, *, before: Node) -> Node:
    """Insert q-dq of ``node`` and return the dequantize node."""
    with graph_module.graph.inserting_before(before):
        return insert_q_dq(graph_module.graph, node, qparams, constants_in(graph_module))
