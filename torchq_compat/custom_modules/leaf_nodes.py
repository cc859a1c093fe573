"""Leaf nodes: the captured leaf op becomes a call of the module that does the work."""

from __future__ import annotations

import operator
from typing import Any

import torch.utils._pytree as pytree
from torch import nn
from torch.fx import GraphModule, Node

from torchq_compat.custom_modules.layouts import CallLayout
from torchq_compat.custom_modules.leaf_module import LeafModule
from torchq_compat.custom_modules.leaf_op import LEAF_OP, CaptureSession

__all__ = ["LEAF_KEY", "leaf_nodes", "place_leaves"]

#: meta key that marks a leaf call; the value is the module path.
LEAF_KEY = "torchq_compat_leaf"


def place_leaves(graph_module: GraphModule, session: CaptureSession, modules: dict[str, nn.Module]) -> None:
    """Replace every leaf op in ``graph_module`` by a call of ``modules[handle]``, placed at that path."""
    for node in list(graph_module.graph.nodes):
        if node.target is not LEAF_OP:
            continue
        tensors, handle, index = node.args
        module = modules[handle]
        if (
            handle not in dict(graph_module.named_modules())
            or graph_module.get_submodule(handle) is not module
        ):
            graph_module.add_submodule(handle, module)
        layouts = session.layouts(handle)
        if isinstance(module, LeafModule):
            module.layouts = layouts
            _call_flat(graph_module, node, handle, tuple(tensors), index)
        else:
            _call_nested(graph_module, node, handle, tuple(tensors), layouts[index])
    graph_module.graph.eliminate_dead_code()
    graph_module.graph.lint()
    graph_module.recompile()


def leaf_nodes(graph_module: GraphModule) -> list[Node]:
    """The calls of leaf modules in ``graph_module``."""
    return [
        node
        for node in graph_module.graph.nodes
        if node.op == "call_module" and isinstance(graph_module.get_submodule(str(node.target)), LeafModule)
    ]


def _call_flat(
    graph_module: GraphModule, node: Node, path: str, tensors: tuple[Any, ...], index: int
) -> None:
    with graph_module.graph.inserting_before(node):
        call = graph_module.graph.call_module(path, tensors, {"layout": index})
    call.meta = {**node.meta, LEAF_KEY: path}
    node.replace_all_uses_with(call)
    graph_module.graph.erase_node(node)
    call._rename(path.replace(".", "_"))


def _call_nested(
    graph_module: GraphModule, node: Node, path: str, tensors: tuple[Any, ...], layout: CallLayout
) -> None:
    """A float module keeps its own calling form: nested arguments, and getitem chains for its results."""
    args, kwargs = layout.inputs.put_together(tensors)
    graph = graph_module.graph
    with graph.inserting_before(node):
        call = graph.call_module(path, args, kwargs)
        call.meta = {key: value for key, value in node.meta.items() if key != "val"}
        dummy = layout.outputs.put_together(range(sum(layout.outputs.is_tensor)))
        for keys, position in pytree.tree_flatten_with_path(dummy)[0]:
            for getitem in [user for user in node.users if user.args[1] == position]:
                result = call
                for key in keys:
                    index: Any = getattr(key, "idx", None)
                    result = graph.call_function(operator.getitem, (result, index))
                result.meta = dict(getitem.meta)
                getitem.replace_all_uses_with(result)
                graph.erase_node(getitem)
    graph.erase_node(node)
