"""The Python function that each op of a captured graph comes from, where Quantizers look for it.

``get_source_partitions(graph, [operator.add, torch.add])`` reads ``source_fn_stack``, which torch.export
leaves out unless it is strict. Modules it finds by ``nn_module_stack``, which every export has.
"""

from __future__ import annotations

from torch import nn
from torch.fx import GraphModule

from torchq_compat.capture.origins import OPERATOR_OF_METHOD, find_origin

__all__ = ["restore_source_functions"]

SOURCE_FUNCTIONS = "source_fn_stack"


def restore_source_functions(graph_module: GraphModule, model: nn.Module) -> None:
    """Write the function or method behind each op of ``graph_module`` outside the modules of torch.nn.

    ``x + y`` and ``x.add(y)`` are ``operator.add``, another method its name, as in a strict export; ``+=``
    is ``operator.add``, too, for the graph computes it out of place.

    Args:
        model: what was exported.
    """
    for node in graph_module.graph.nodes:
        if node.op != "call_function" or SOURCE_FUNCTIONS in node.meta or "torch_fn" not in node.meta:
            continue
        origin = find_origin(node, model)
        if origin.is_module_call or not origin.object_types:
            continue
        source, *_ = origin.object_types
        if isinstance(source, str):
            source = OPERATOR_OF_METHOD.get(source, source)
        # torch_fn counts the calls of each function: all ops of one call have the same.
        node.meta[SOURCE_FUNCTIONS] = [(".".join(node.meta["torch_fn"]), source)]
