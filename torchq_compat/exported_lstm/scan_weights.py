"""Moves the weights of a converted scan body into the graph that contains the scan.

The body owned its weights so that torchao could fold them; torch.export saves a scan only if they are
additional inputs of the scan.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule, Node

from torchq_compat.exported_lstm.rolled import SCAN

__all__ = ["hoist_weights"]


def hoist_weights(graph_module: GraphModule) -> None:
    """Turn all tensors owned by the scan bodies of ``graph_module`` into buffers of ``graph_module``."""
    for scan in [node for node in graph_module.graph.nodes if node.target is SCAN]:
        arguments: Any = scan.args
        body_node, init, xs, additional = arguments
        values = _take_out(graph_module, str(body_node.target))
        inputs = []
        for name, value in values.items():
            nn.Module.register_buffer(graph_module, f"{body_node.target}_{name}", value)
            with graph_module.graph.inserting_before(scan):
                inputs.append(graph_module.graph.get_attr(f"{body_node.target}_{name}"))
        scan.args = (body_node, init, xs, (*additional, *inputs))
    graph_module.graph.lint()
    graph_module.recompile()


def _take_out(graph_module: GraphModule, path: str) -> dict[str, Tensor]:
    """Turn the tensors owned by the body at ``path`` into its last inputs; return them by name, in order."""
    body = graph_module.get_submodule(path)
    assert isinstance(body, GraphModule)
    owned: list[Node] = [node for node in body.graph.nodes if node.op == "get_attr"]
    names = dict.fromkeys(str(node.target) for node in owned)
    values = {name: getattr(body, name).detach() for name in names}
    last = [node for node in body.graph.nodes if node.op == "placeholder"][-1]
    arguments: dict[str, Node] = {}
    for name in names:
        with body.graph.inserting_after(last):
            last = arguments[name] = body.graph.placeholder(name)
    for node in owned:
        argument = arguments[str(node.target)]
        argument.meta = dict(node.meta)
        node.replace_all_uses_with(argument)
        body.graph.erase_node(node)
    setattr(graph_module, path, GraphModule(nn.Module(), body.graph))
    return values
