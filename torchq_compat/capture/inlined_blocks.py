"""Inlines blocks under ``torch.no_grad()`` or autocast into the graph around them, as FX traced them.

torch.export puts such a block into a submodule behind a higher-order op. No pass inspects the submodule, so
nothing in it would be quantized, and torchao after 0.18 refuses graphs with such a block.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchq_compat.ops import written_by
from torchq_compat.support.graph_nodes import attribute_of, replace_node, replace_results
from torchq_compat.support.upstream import FakeTensor

HIGHER_ORDER = torch.ops.higher_order
#: Higher-order op -> how many of its arguments are settings, before the submodule.
SETTINGS = {HIGHER_ORDER.wrap_with_set_grad_enabled: 1, HIGHER_ORDER.wrap_with_autocast: 4}
#: The op that asserts the dtype of a value under autocast.
ASSERT_METADATA = torch.ops.aten._assert_tensor_metadata.default


@dataclass(frozen=True)
class Block:
    """A block that was inlined.

    Attributes:
        path: the path of the module whose code opens the block.
        context: the name of the context: ``torch.no_grad``, ``torch.enable_grad`` or ``torch.autocast``.
        casts: whether autocast was enabled in it, so that its ops ran in another dtype.
    """

    path: str
    context: str
    casts: bool


def is_block(node: Node) -> bool:
    """Return whether ``node`` calls a block. A block without results may still write into its inputs."""
    return node.target in SETTINGS


def inline_blocks(graph_module: GraphModule) -> tuple[Block, ...]:
    """Inline every block of ``graph_module``, nested ones included, and return the blocks. Autocast is lost,
    as in FX: the ops run in the dtype of their inputs."""
    blocks: list[Block] = []
    inlined: list[Node] = []
    while (call := next((node for node in graph_module.graph.nodes if is_block(node)), None)) is not None:
        body, nodes = _inline(graph_module, call)
        inlined.extend(nodes)
        if nodes:
            blocks.append(_describe(call, nodes))
        if not body.users:
            graph_module.graph.erase_node(body)
    read = {
        str(node.target).partition(".")[0]
        for node in graph_module.graph.nodes
        if node.op in ("get_attr", "call_module")
    }
    for name, child in list(graph_module.named_children()):
        if isinstance(child, GraphModule) and name not in read:
            delattr(graph_module, name)
    if any(block.casts for block in blocks):
        _forget_autocast(graph_module, inlined)
    if blocks:
        graph_module.graph.lint()
        graph_module.recompile()
    return tuple(dict.fromkeys(blocks))


def _inline(graph_module: GraphModule, call: Node) -> tuple[Node, list[Node]]:
    """Put copies of the nodes of the submodule in the place of ``call``; return the node that read the
    submodule, and the copied ops."""
    body_node, *operands = call.args[SETTINGS[call.target] :]  # type: ignore[index]
    assert isinstance(body_node, Node)
    body = graph_module.get_submodule(str(body_node.target))
    assert isinstance(body, GraphModule)
    copies: dict[Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), operands, strict=True))
    result: list[Node] = []
    with graph_module.graph.inserting_before(call):
        for node in body.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            copy = graph_module.graph.node_copy(node, lambda inner: copies[inner])
            if node.op == "get_attr":
                copy.target = f"{body_node.target}.{node.target}"
            copies[node] = copy
            result.append(copy)
    if call.target is HIGHER_ORDER.wrap_with_set_grad_enabled and not call.args[0]:
        for node in result:
            _write_without_gradient(node)
    results = torch.fx.node.map_arg(body.graph.output_node().args[0], lambda inner: copies[inner])
    if isinstance(results, (tuple, list)):
        replace_results(call, results)
    else:
        replace_node(call, results)
    return body_node, [node for node in result if node.op == "call_function"]


def _write_without_gradient(node: Node) -> None:
    """Detach what ``node`` writes into a buffer: the next step of training would go back through this one."""
    written = [item for item in written_by(node.target, node.args, node.kwargs) if isinstance(item, Node)]
    if not any(_home(item).op == "get_attr" for item in written):
        return
    with node.graph.inserting_before(node):
        for read in node.all_input_nodes:
            if read not in written and isinstance(read.meta.get("val"), Tensor):
                detached = node.graph.call_function(torch.ops.aten.detach.default, (read,))
                detached.meta = {key: value for key, value in node.meta.items() if key != "torch_fn"}
                detached.meta["val"] = read.meta["val"].detach()
                node.replace_input_with(read, detached)


def _home(node: Node) -> Node:
    """Return what ``node`` is a view of."""
    schema = getattr(node.target, "_schema", None)
    is_view = schema is not None and any(result.alias_info is not None for result in schema.returns)
    source = node.args[0] if is_view and node.args else None
    return _home(source) if isinstance(source, Node) else node


def _describe(call: Node, nodes: list[Node]) -> Block:
    stacks = [node.meta.get("nn_module_stack") or {} for node in nodes]
    paths = [[str(fqn) for fqn, _ in stack.values()] for stack in stacks if stack]
    common = [path for path in paths[0] if all(path in other for other in paths)] if paths else [""]
    path = common[-1] if common else ""
    if call.target is HIGHER_ORDER.wrap_with_autocast:
        return Block(path, "torch.autocast", bool(call.args[2]))
    return Block(path, "torch.enable_grad" if call.args[0] else "torch.no_grad", casts=False)


def _forget_autocast(graph_module: GraphModule, inlined: Iterable[Node]) -> None:
    """Recompute the example values that depend on ``inlined``, which have other dtypes without autocast."""
    graph, changed = graph_module.graph, set(inlined)
    for node in list(graph.nodes):
        if node.target is ASSERT_METADATA:
            graph.erase_node(node)
            continue
        before = node.meta.get("val")
        reached = node in changed or any(source in changed for source in node.all_input_nodes)
        if node.op != "call_function" or not reached or before is None:
            continue
        args, kwargs = torch.fx.node.map_arg(
            (node.args, node.kwargs),
            lambda item: item.meta["val"] if "val" in item.meta else attribute_of(graph_module, item),
        )
        with _fake_mode(before), torch.no_grad():
            node.meta["val"] = node.target(*args, **kwargs)
        changed.add(node)


def _fake_mode(value: Any) -> Any:
    leaves = value if isinstance(value, (tuple, list)) else [value]
    fakes = (leaf for leaf in leaves if isinstance(leaf, Tensor) and isinstance(leaf, FakeTensor))
    return next((fake.fake_mode for fake in fakes), nullcontext())
