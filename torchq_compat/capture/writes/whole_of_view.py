"""Computes the new value of a tensor from the new value of a view of it."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from torchq_compat.errors import CaptureError
from torchq_compat.support.graph_nodes import user_line_of

__all__ = ["are_alike", "is_same_view", "is_whole", "scatters", "whole_of_view"]

ATEN = torch.ops.aten
#: Ops that return the elements of their input, in its order, in the same or another shape.
RESHAPES = (
    "_reshape_alias",
    "_unsafe_view",
    "alias",
    "contiguous",
    "detach",
    "flatten",
    "ravel",
    "reshape",
    "reshape_as",
    "squeeze",
    "to",
    "unflatten",
    "unsqueeze",
    "view",
    "view_as",
)
#: Ops that return their input when applied twice.
EXCHANGES = ("adjoint", "mH", "mT", "matrix_H", "numpy_T", "swapaxes", "swapdims", "t", "transpose")
#: An op that returns a part of a tensor -> the op that returns the tensor with that part replaced.
SCATTERS = {
    "select": ATEN.select_scatter.default,
    "slice": ATEN.slice_scatter.default,
    "diagonal": ATEN.diagonal_scatter.default,
}
#: Ops that split a tensor along a dimension into pieces whose concatenation is the tensor.
SPLITS = ("chunk", "split", "split_with_sizes", "tensor_split")


def scatters(view: Node) -> bool:
    """Return whether an aten op puts the part ``view`` back into its tensor."""
    return _name_of(view) in SCATTERS


def is_same_view(node: Node, other: Node) -> bool:
    """Return whether both nodes are the same view of the same value."""
    return (node.target, node.args, node.kwargs) == (other.target, other.args, other.kwargs)


def is_whole(view: Node) -> bool:
    """Return whether ``view`` is its base under another name, as the result of an Identity is."""
    return (
        _name_of(view) in RESHAPES
        and view.target is not ATEN.detach.default
        and are_alike(view.args[0], view)
    )


def are_alike(node: Any, other: Node) -> bool:
    """Return whether the example values of both have the same shape, dtype and device."""
    ours = node.meta.get("val") if isinstance(node, Node) else None
    theirs = other.meta.get("val")
    if not isinstance(ours, Tensor) or not isinstance(theirs, Tensor):
        return False
    return (str(ours.shape), ours.dtype, ours.device) == (str(theirs.shape), theirs.dtype, theirs.device)


def whole_of_view(view: Node, parent: Node, value: Node, meta: dict[str, Any]) -> tuple[Node, Node]:
    """Return the base of ``view``, and the base's value when ``value`` is the value of the view. New nodes
    are inserted at the graph's insertion point.

    Args:
        view: a view of ``parent``, or a piece of a tensor that ``parent`` split.
        value: the new value of the view.
        meta: the metadata of new nodes, except their example values.

    Raises:
        CaptureError: no op computes the value of the base.
    """
    if view.target is operator.getitem:
        return _whole_of_piece(view, parent, value, meta)
    base: Any = view.args[0]
    if is_whole(view):
        return base, value
    rest: Any = view.args[1:]
    name, graph = _name_of(view), view.graph
    if name in SCATTERS:
        made = graph.call_function(SCATTERS[name], (base, value, *rest), view.kwargs)
    elif name == "narrow":
        dim, start, length = rest
        are_known = isinstance(start, int) and isinstance(length, int)
        end = start + length if are_known else graph.call_function(operator.add, (start, length))
        made = graph.call_function(ATEN.slice_scatter.default, (base, value, dim, start, end))
    elif name in RESHAPES and _dtype_of(view) == _dtype_of(base):
        made = graph.call_function(ATEN.reshape_as.default, (value, base))
    elif name in EXCHANGES:
        made = graph.call_function(view.target, (value, *rest), view.kwargs)  # type: ignore[arg-type]
    elif name == "permute":
        made = graph.call_function(ATEN.permute.default, (value, _inverse(rest[0])))
    elif name == "movedim":
        made = graph.call_function(view.target, (value, rest[1], rest[0]))  # type: ignore[arg-type]
    else:
        raise _without_form(view)
    made.meta = {**meta, "val": base.meta.get("val")}
    return base, made


def _whole_of_piece(view: Node, parent: Node, value: Node, meta: dict[str, Any]) -> tuple[Node, Node]:
    base: Any = parent.args[0]
    graph, name, count = view.graph, _name_of(parent), len(parent.meta["val"])
    if name not in (*SPLITS, "unbind"):
        raise _without_form(view)
    pieces: list[Node] = []
    for index in range(count):
        if index == view.args[1]:
            pieces.append(value)
            continue
        pieces.append(graph.call_function(operator.getitem, (parent, index)))
        pieces[-1].meta = {**meta, "val": parent.meta["val"][index]}
    dim = _dim_of(parent, 1 if name == "unbind" else 2)
    made = graph.call_function(ATEN.stack.default if name == "unbind" else ATEN.cat.default, (pieces, dim))
    made.meta = {**meta, "val": base.meta.get("val")}
    return base, made


def _name_of(node: Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return "" if schema is None else str(schema.name).removeprefix("aten::")


def _dim_of(split: Node, position: int) -> Any:
    return split.kwargs.get("dim", split.args[position] if len(split.args) > position else 0)


def _dtype_of(node: Any) -> Any:
    return getattr(node.meta.get("val"), "dtype", None)


def _inverse(dims: Sequence[int]) -> list[int]:
    positive = [dim % len(dims) for dim in dims]
    return [positive.index(dim) for dim in range(len(dims))]


def _without_form(view: Node) -> CaptureError:
    line = user_line_of(view)
    where = f" at {line}" if line else ""
    return CaptureError(
        f"the model writes into a view of an intermediate value, made by {view.target}{where}: "
        "quantized, it would write into a copy.",
        hint="write into a clone and use that: `part = value.unfold(...).clone()`, or write into the value "
        "itself by indices. The model was not changed.",
    )
