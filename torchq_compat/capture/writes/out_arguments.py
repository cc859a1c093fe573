"""Makes an op with ``out=`` one without, whose result is copied into the tensor that was given as ``out``."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from torchq_compat.capture.origins import meta_outside_leaves
from torchq_compat.support.upstream import OpOverload, pytree

__all__ = ["write_results_into_out"]

ATEN = torch.ops.aten


def write_results_into_out(graph: Graph) -> None:
    """Rewrite the ops of ``graph`` that have ``out=`` arguments, unless a result resizes one of them."""
    for node in list(graph.nodes):
        names = _out_names(node)
        plain = _without_out(node.target) if names else None
        written = [node.kwargs.get(name) for name in names]
        if plain is None or not all(isinstance(each, Node) for each in written):
            continue
        kwargs = {name: value for name, value in node.kwargs.items() if name not in names}
        values = _values(plain, node.args, kwargs)
        if [str(each.shape) for each in values] == [str(each.meta["val"].shape) for each in written]:
            _rewrite(graph, node, (plain, kwargs), written, values)


def _rewrite(
    graph: Graph,
    node: Node,
    call: tuple[OpOverload, dict[str, Any]],
    written: list[Any],
    values: list[Tensor],
) -> None:
    with graph.inserting_before(node):
        result = _make(graph, call[0], (node.args, call[1]), node)
        results = [result]
        if len(written) > 1:
            result.meta["val"] = tuple(values)
            results = [_make(graph, operator.getitem, ((result, i), {}), node) for i in range(len(written))]
        for into, each, value in zip(written, results, values, strict=True):
            each.meta["val"] = value
            _make(graph, ATEN.copy_.default, ((into, each), {}), node).meta["val"] = into.meta["val"]
    if len(written) == 1:
        node.replace_all_uses_with(written[0])
    for user in list(node.users):
        user.replace_all_uses_with(written[user.args[1]])  # type: ignore[index]
        graph.erase_node(user)
    graph.erase_node(node)


def _values(plain: OpOverload, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the results of ``plain`` for the example values of its arguments; none if they are not known."""
    args, kwargs = pytree.tree_map_only(Node, lambda each: each.meta.get("val"), (args, kwargs))
    try:
        made = plain(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError):
        return []
    return list(made) if isinstance(made, (tuple, list)) else [made]


def _make(graph: Graph, target: Any, called: tuple[Any, Any], like: Node) -> Node:
    made = graph.call_function(target, *called)
    made.meta = {key: value for key, value in meta_outside_leaves(like).items() if key != "torch_fn"}
    return made


def _out_names(node: Node) -> list[str]:
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return []
    return [argument.name for argument in target._schema.arguments if argument.is_out]


def _without_out(target: Any) -> OpOverload | None:
    """Return the overload of the same op that takes the other arguments of ``target``, or None."""
    wanted = [(each.name, str(each.type)) for each in target._schema.arguments if not each.is_out]
    packet = target.overloadpacket
    for name in packet.overloads():
        overload: OpOverload = getattr(packet, name)
        if [(each.name, str(each.type)) for each in overload._schema.arguments] == wanted:
            return overload
    return None
