"""The values that an op of a prepared or converted graph reads as integers: its weights and inputs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from torchq_compat.qspecs.qdq import (
    CHOOSE_QPARAMS,
    DEQUANTIZE_DYNAMIC,
    DEQUANTIZE_PER_CHANNEL,
    DEQUANTIZES,
    QUANTIZE,
    QUANTIZE_PER_CHANNEL,
)
from torchq_compat.support.decisions import QuantizedValue
from torchq_compat.support.graph_nodes import attribute_of
from torchq_compat.support.upstream import is_activation_post_process

__all__ = ["quantized_values", "result_details"]

QUANTIZES = (QUANTIZE, QUANTIZE_PER_CHANNEL)


def result_details(node: Node | None) -> dict[str, Any]:
    """Return dtype, scale and zero point of the value of ``node``; empty if it is not quantized."""
    for user in node.users if node else ():
        if user.target is QUANTIZE:
            _, scale, zero_point, _, _, dtype = user.args
            return {"dtype": dtype, "scale": scale, "zero_point": zero_point}
    return {}


def quantized_values(
    model: GraphModule, node: Node, path: str, others: Collection[Node], quantized: Collection[Node]
) -> tuple[QuantizedValue, ...]:
    """Return the weights and inputs that the op ending in ``node`` reads as integers.

    Args:
        model: a prepared or converted graph.
        node: the last node of the op; the nodes before it, up to those of ``others``, belong to the op.
        path: the module path of the op.
        others: the last nodes of the other ops.
        quantized: the nodes whose result is quantized; an input with the qparams of that result is left out.
    """
    found: list[QuantizedValue] = []
    for edge in _edges_into(model, node, others):
        value = _of_edge(model, edge, path, quantized)
        if value is not None and value not in found:
            found.append(value)
    inputs = [value for value in found if value.role == "input"]
    return tuple(
        value if value.role == "weight" or len(inputs) == 1 else value.numbered(inputs.index(value))
        for value in found
    )


def _edges_into(model: GraphModule, last: Node, others: Collection[Node]) -> Iterator[Node]:
    """Yield the q-dq nodes and observers of the values that the op reads, in the order of its arguments."""
    for argument in last.all_input_nodes:
        if argument in others or argument.op in ("placeholder", "get_attr"):
            continue
        if _is_edge(model, argument):
            yield argument
        elif argument.op == "call_function":
            yield from _edges_into(model, argument, others)


def _is_edge(model: GraphModule, node: Node) -> bool:
    if node.op == "call_module":
        return bool(is_activation_post_process(model.get_submodule(str(node.target))))
    return node.target in (*DEQUANTIZES, *QUANTIZES, DEQUANTIZE_DYNAMIC)


def _of_edge(model: GraphModule, edge: Node, path: str, quantized: Collection[Node]) -> QuantizedValue | None:
    source, read = edge, edge
    while source.op != "placeholder" and _is_edge(model, source):
        read, source = source, source.all_input_nodes[0]
    if read.target in DEQUANTIZES and source.op == "call_function":
        return None  # An opaque call returns these integers.
    is_weight = _is_constant(source)
    if not is_weight and source in quantized:
        first = next((user for user in source.users if _is_edge(model, user)), None)
        if first in (read, edge):
            return None  # This is the result of the op before.
    qparams = _qparams(model, edge, source)
    if is_weight:
        name = "bias" if source.op == "get_attr" and str(source.target).endswith("bias") else "weight"
        return QuantizedValue(f"{path}.{name}", "weight", **qparams)
    return QuantizedValue(f"{path}.input", "input", **qparams)


def _is_constant(source: Node) -> bool:
    """Return whether ``source`` is a weight or computed only from weights, as a fused weight is in QAT."""
    waiting, seen = [source], set[Node]()
    while waiting:
        node = waiting.pop()
        if node.op == "get_attr" or node in seen:
            continue
        if node.op != "call_function" or not node.all_input_nodes:
            return False
        seen.add(node)
        waiting.extend(reversed(node.all_input_nodes))  # Follow the path back to the model's input first.
    return True


def _qparams(model: GraphModule, edge: Node, source: Node) -> dict[str, Any]:
    if edge.op == "call_module":
        return _of_observer(model.get_submodule(str(edge.target)), source)
    if edge.target is DEQUANTIZE_DYNAMIC:
        return {"dtype": edge.args[-1], "dynamic": True, "spread": _spread(edge)}
    if edge.target in (DEQUANTIZE_PER_CHANNEL, QUANTIZE_PER_CHANNEL):
        scales = edge.args[1]
        value = attribute_of(model, scales) if isinstance(scales, Node) else None
        channels = value.numel() if isinstance(value, Tensor) else None
        return {"dtype": edge.args[6], "channels": channels, "axis": edge.args[3]}
    _, scale, zero_point, _, _, dtype = edge.args
    return {"dtype": dtype, "scale": scale, "zero_point": zero_point}


def _spread(edge: Node) -> tuple[int, int] | None:
    """Return the least and largest integer that the qparams of a dynamic dequantize are chosen for."""
    scale = edge.args[1]
    chosen = scale.args[0] if isinstance(scale, Node) else None
    if not isinstance(chosen, Node) or chosen.target is not CHOOSE_QPARAMS:
        return None
    return chosen.args[1], chosen.args[2]  # type: ignore[return-value]


def _of_observer(observer: Any, source: Node) -> dict[str, Any]:
    told: dict[str, Any] = {"dtype": getattr(observer, "dtype", None)}
    if getattr(observer, "is_dynamic", False):
        told["dynamic"] = True
    # A derived observer has None as ch_axis.
    axis, value = getattr(observer, "ch_axis", None), source.meta.get("val")
    if axis is not None and axis >= 0 and "channel" in str(getattr(observer, "qscheme", "")):
        scale = getattr(observer, "scale", None)
        known = scale.numel() if isinstance(scale, Tensor) and scale.numel() > 1 else None
        told |= {"channels": int(value.shape[axis]) if isinstance(value, Tensor) else known, "axis": axis}
    return told
