"""Replaces captured opaque ops by calls of the modules that do the work."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn.utils.rnn import PackedSequence

from torchq_compat.opaque_calls.capture_stub import OPAQUE_OP, ORIGINAL, StubRegistry
from torchq_compat.opaque_calls.layouts import Field, Structure
from torchq_compat.opaque_calls.opaque_module import OpaqueModule
from torchq_compat.support import metadata
from torchq_compat.support.upstream import pytree

__all__ = ["example_call", "insert_calls", "opaque_call_nodes", "tensor_arguments"]

ATEN = torch.ops.aten
#: Ops that use only the dtype and device of their first argument.
NEW_TENSOR = (ATEN.new_zeros.default, ATEN.new_ones.default, ATEN.new_empty.default, ATEN.new_full.default)


def insert_calls(
    graph_module: GraphModule,
    stubs: StubRegistry,
    modules: dict[str, nn.Module],
    writers: Mapping[str, Callable[..., list[Node] | None]] = MappingProxyType({}),
) -> list[str]:
    """Replace every opaque op in ``graph_module`` by a call of ``modules[handle]``, at the path ``handle``.

    A float module that is never called is added if the model reads parameters of it.

    Args:
        writers: functions that write float modules as ops instead, by path; see
            ``CustomModuleHandler.ops_writer``.

    Returns:
        The names of the parameters of observed modules that the model itself reads, from copies.
    """
    copied = [name for entry in modules.items() for name in _keep_parameters_read(graph_module, *entry)]
    for node in list(graph_module.graph.nodes):
        if node.target is not OPAQUE_OP:
            continue
        tensors, sizes, handle, index = node.args
        module = modules[handle]
        if (
            handle not in dict(graph_module.named_modules())
            or graph_module.get_submodule(handle) is not module
        ):
            graph_module.add_submodule(handle, module)
        layouts = stubs.layouts(handle)
        if isinstance(module, OpaqueModule):
            module.opaque_layouts = layouts
            _call_flat(graph_module, node, handle, (*tensors, *sizes), index)
        else:
            args, kwargs = layouts[index].inputs.put_together(tensors, sizes)
            write = writers.get(handle)
            results = None if write is None else write(graph_module, node, handle, args, kwargs)
            if results is not None:
                _use(node, results)
                continue
            _call_nested(graph_module, node, handle, args, kwargs, layouts[index].outputs)
    graph_module.graph.eliminate_dead_code()
    graph_module.graph.lint()
    graph_module.recompile()
    return copied


def _keep_parameters_read(graph_module: GraphModule, handle: str, module: nn.Module) -> list[str]:
    """Keep the parameters of the float custom module at ``handle`` that the model itself reads.

    If ``module`` is the float module, the graph reads its parameters. Otherwise ``module`` replaces the float
    module, and the parameters become buffers of the graph, empty ones if only dtype and device are used.
    Return the names of the parameters whose values were copied.
    """
    prefix, copied = f"{handle}.{ORIGINAL}.", []
    for node in list(graph_module.graph.nodes):
        if node.op != "get_attr" or not str(node.target).startswith(prefix):
            continue
        if not node.users:
            graph_module.graph.erase_node(node)
            continue
        name = f"{handle}.{str(node.target).removeprefix(prefix)}"
        if not isinstance(module, OpaqueModule):
            graph_module.add_submodule(handle, module)
            node.target = name
            continue
        value = operator.attrgetter(str(node.target))(graph_module).detach()
        only_metadata = all(user.target in NEW_TENSOR for user in node.users)
        kept = name.replace(".", "_") + ("_like" if only_metadata else "")
        nn.Module.register_buffer(graph_module, kept, value.new_empty(0) if only_metadata else value.clone())
        node.target = kept
        if not only_metadata:
            copied.append(name)
    return copied


def opaque_call_nodes(graph_module: GraphModule) -> list[Node]:
    """Return the calls of opaque modules in ``graph_module``."""
    return [
        node
        for node in graph_module.graph.nodes
        if node.op == "call_module" and isinstance(graph_module.get_submodule(str(node.target)), OpaqueModule)
    ]


def tensor_arguments(call: Node, module: OpaqueModule) -> tuple[Node, ...]:
    """Return the tensor arguments of an opaque call, which precede its sizes."""
    index = call.kwargs["opaque_layout"]
    assert isinstance(index, int)
    tensors = call.args[: module.opaque_layouts[index].inputs.count()]
    assert all(isinstance(tensor, Node) for tensor in tensors)
    return tuple(tensor for tensor in tensors if isinstance(tensor, Node))


def example_call(
    call: Node, module: OpaqueModule, tensors: Sequence[Tensor]
) -> tuple[list[Any], list[Tensor]]:
    """Return the arguments of an opaque call in the example, its ``tensors`` followed by sizes, and zeros of
    the shapes and dtypes of its results."""
    count = len(tensor_arguments(call, module))
    sizes = [_example_size(size) for size in call.args[count:]]
    return [*tensors, *sizes], [_zeros(value) for value in call.meta["val"]]


def _zeros(value: Tensor) -> Tensor:
    shape = [_example_size(size) for size in value.shape]
    return torch.zeros(shape, dtype=value.dtype, device=value.device)


def _example_size(size: Any) -> int:
    value = size.meta["val"] if isinstance(size, Node) else size
    if not isinstance(value, torch.SymInt):
        return int(value)
    # The number of rows of a PackedSequence is known only at run time.
    return value.node.hint if value.node.has_hint() else 1


def _is_packed(value: Any) -> bool:
    return isinstance(value, PackedSequence)


def _call_flat(graph_module: GraphModule, node: Node, path: str, flat: tuple[Any, ...], index: int) -> None:
    with graph_module.graph.inserting_before(node):
        call = graph_module.graph.call_module(path, flat, {"opaque_layout": index})
    call.meta = {**node.meta, metadata.OPAQUE_CALL.name: path}
    node.replace_all_uses_with(call)
    graph_module.graph.erase_node(node)
    call._rename(path.replace(".", "_"))


def _use(node: Node, results: Sequence[Node]) -> None:
    """Replace the results of the opaque op ``node`` by ``results``."""
    for getitem in list(node.users):
        position = getitem.args[1]
        assert isinstance(position, int)
        getitem.replace_all_uses_with(results[position])
        node.graph.erase_node(getitem)
    node.graph.erase_node(node)


def _call_nested(
    graph_module: GraphModule,
    node: Node,
    path: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outputs: Structure,
) -> None:
    """Replace the opaque op ``node`` by a call of a float module in the module's own form: nested arguments,
    and a chain of lookups for each result."""
    graph = graph_module.graph
    with graph.inserting_before(node):
        args, kwargs = pytree.tree_map(
            lambda leaf: graph.call_function(PackedSequence, tuple(leaf)) if _is_packed(leaf) else leaf,
            (args, kwargs),
            is_leaf=_is_packed,
        )
        call = graph.call_module(path, args, kwargs)
        call.meta = {key: value for key, value in node.meta.items() if key != "val"}
        for position, keys in enumerate(outputs.tensor_keys()):
            for getitem in [user for user in node.users if user.args[1] == position]:
                result = call
                for key in keys:
                    lookup = getattr if isinstance(key, Field) else operator.getitem
                    result = graph.call_function(lookup, (result, key))
                result.meta = dict(getitem.meta)
                getitem.replace_all_uses_with(result)
                graph.erase_node(getitem)
    graph.erase_node(node)
