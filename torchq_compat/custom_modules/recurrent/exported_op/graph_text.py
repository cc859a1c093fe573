"""Converts a graph of operator calls to plain data for JSON, and back.

The data is stored inside an exported program. It has no code, only names of operators and their arguments.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from torchq_compat.qspecs.qdq import NAMESPACE
from torchq_compat.support.dtypes import dtype_name, dtype_named

__all__ = ["graph_from_data", "graph_to_data"]

#: The namespaces of operators that a text may call.
NAMESPACES = ("aten", NAMESPACE)
GETITEM = "getitem"


def graph_to_data(graph: Graph) -> dict[str, Any]:
    """Return ``graph`` as data: ``weights``, the attributes it reads; ``inputs``; ``nodes``, each (name,
    operator, args, kwargs), in order; ``results``. A value of the graph is ``{"value": name}``, a dtype
    ``{"dtype": name}``.

    A weight has the name of its node, because a path with dots cannot be the name of an attribute.
    """
    return {
        "weights": [node.name for node in graph.find_nodes(op="get_attr")],
        "inputs": [node.name for node in graph.find_nodes(op="placeholder")],
        "nodes": [
            [node.name, _operator_name(node), _to_data(node.args), _to_data(dict(node.kwargs))]
            for node in graph.nodes
            if node.op == "call_function"
        ],
        "results": _to_data(graph.output_node().args[0]),
    }


def graph_from_data(data: Mapping[str, Any]) -> Graph:
    """Return the graph that ``graph_to_data`` wrote as ``data``.

    Raises:
        ValueError: if an operator is not in ``NAMESPACES``.
    """
    graph = Graph()
    values: dict[str, Node] = {}
    for name in data["inputs"]:
        values[name] = graph.placeholder(name)
    for name in data["weights"]:
        values[name] = graph.get_attr(name)
    for name, operator_name, args, kwargs in data["nodes"]:
        arguments = tuple(_from_data(args, values)), _from_data(kwargs, values)
        values[name] = graph.call_function(_operator(operator_name), *arguments)
    graph.output(tuple(_from_data(data["results"], values)))
    return graph


def _operator_name(node: Node) -> str:
    return GETITEM if node.target is operator.getitem else str(node.target)


def _operator(name: str) -> Any:
    if name == GETITEM:
        return operator.getitem
    namespace, packet, overload = name.split(".")
    if namespace not in NAMESPACES:
        raise ValueError(f"the operator {name} is none of {', '.join(NAMESPACES)}")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def _to_data(argument: Any) -> Any:
    if isinstance(argument, Node):
        return {"value": argument.name}
    if isinstance(argument, torch.dtype):
        return {"dtype": dtype_name(argument)}
    if isinstance(argument, (tuple, list)):
        return [_to_data(each) for each in argument]
    if isinstance(argument, dict):
        return {key: _to_data(value) for key, value in argument.items()}
    return argument


def _from_data(data: Any, values: Mapping[str, Node]) -> Any:
    if isinstance(data, list):
        return [_from_data(each, values) for each in data]
    if not isinstance(data, dict):
        return data
    if "value" in data:
        return values[data["value"]]
    if "dtype" in data:
        return dtype_named(data["dtype"])
    return {key: _from_data(value, values) for key, value in data.items()}
