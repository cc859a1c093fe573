"""The function, or class of module, that each op of a captured graph comes from, where Quantizers look.

``get_source_partitions(graph, [operator.add, torch.add])`` and what backends have like it read
``source_fn_stack``, which torch.export leaves out unless it is strict.
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

#: Key of torch's on ``node.meta``.
SOURCE_FUNCTIONS = "source_fn_stack"


def restore_source_functions(graph_module: GraphModule, model: nn.Module) -> None:
    """Write what a strict export writes: the class of the module of torch.nn whose code an op is, else the
    function or method.

    ``x + y`` and ``x.add(y)`` are ``operator.add``, another method its name; ``+=`` is ``operator.add``, too,
    for the graph computes it out of place. All ops of one call have the same name.

    Args:
        model: what was exported.
    """
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and SOURCE_FUNCTIONS not in node.meta:
            source = _source(node, model)
            if source is not None:
                node.meta[SOURCE_FUNCTIONS] = [source]


def _source(node: Node, model: nn.Module) -> tuple[str, Any] | None:
    """(name of the call, what was called)."""
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
