"""Writes the function, or module class, that each op comes from into the metadata that Quantizers read.

``get_source_partitions(graph, [operator.add, torch.add])`` and similar functions of backends read
``source_fn_stack``, which torch.export writes only in strict mode.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.fx import GraphModule, Node

from torchq_compat.capture.origins import (
    OPERATOR_OF_METHOD,
    find_origin,
    innermost_call,
    is_fx_leaf_class,
)

__all__ = ["SOURCE_FUNCTIONS", "restore_source_functions"]

#: torch's key of ``node.meta``.
SOURCE_FUNCTIONS = "source_fn_stack"


def restore_source_functions(graph_module: GraphModule, model: nn.Module) -> None:
    """Write the ``source_fn_stack`` of a strict export: the class of the torch.nn module that an op belongs
    to, or else the function or method.

    ``x + y`` and ``x.add(y)`` are written as ``operator.add``, other methods as their names; ``+=`` is
    ``operator.add``, too, because the graph computes it out of place. All ops of one call have the same name.

    Args:
        model: the exported module.
    """
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and SOURCE_FUNCTIONS not in node.meta:
            source = _source(node, model)
            if source is not None:
                node.meta[SOURCE_FUNCTIONS] = [source]


def _source(node: Node, model: nn.Module) -> tuple[str, Any] | None:
    """Return (name of the call, the class, function or method called); None if it is unknown."""
    called = innermost_call(node)
    if called is not None and is_fx_leaf_class(called[1]):
        return called
    types = find_origin(node, model).object_types
    if not types or "torch_fn" not in node.meta:
        return None
    source, *_ = types
    # torch_fn counts the calls of each function.
    name = ".".join(node.meta["torch_fn"])
    return name, OPERATOR_OF_METHOD.get(source, source) if isinstance(source, str) else source
