"""Forward hooks of module views, called where the module's ops are in the graph.

Legacy: ``converted.conv1.register_forward_hook``, by which scripts read activations. A view is never called,
so a model whose views have hooks runs a copy of its graph that calls the hooks; the graph itself, which is
exported and saved, is not changed.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from torchq_compat.errors import ModuleAttributeError
from torchq_compat.read.qdq import DEQUANTIZES, QUANTIZE
from torchq_compat.read.qparams import PerTensorQParams, QParams
from torchq_compat.support import metadata
from torchq_compat.support.graph_nodes import behind, module_path_of
from torchq_compat.support.process_state import own_attribute
from torchq_compat.support.quantized_tensors import AVAILABLE, integers_of, is_quantized, of_integers

#: Views that have had a hook; a model checks only these at each call, so models without hooks pay nothing.
HOOKED: WeakSet[nn.Module] = WeakSet()
#: The attributes in which nn.Module keeps forward hooks.
HOOK_STATE = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
#: Attribute that holds the forward with hooks, and the graph, code and views it was compiled from.
WITH_HOOKS = "_torchq_compat_with_hooks"
#: Attribute that marks an exception raised by a hook.
OF_A_HOOK = "_torchq_compat_of_a_hook"
ATEN = torch.ops.aten
BATCH_NORM = ATEN.batch_norm.default
#: Nodes between modules.
BETWEEN = {*map(str, (*DEQUANTIZES, QUANTIZE))} | {
    f"torchq_compat_native.{name}.default" for name in ("quantize", "dequantize")
}


def has_hooks(view: nn.Module) -> bool:
    return bool(view._forward_hooks or view._forward_pre_hooks)


def is_of_a_hook(error: BaseException) -> bool:
    """Return whether ``error`` was raised by a hook, and not by the model."""
    return OF_A_HOOK in vars(error)


def check_hookable(graph_module: GraphModule, path: str) -> None:
    """Raise a ModuleAttributeError unless each call of the module at ``path`` has one result in the graph."""
    calls = _calls_of(graph_module, path)
    if not calls:
        raise _no_place(path, "none of its ops is in the graph by itself")
    for nodes in calls:
        _result_of(nodes, path)


def calling_hooks(model: GraphModule, views: dict[str, nn.Module]) -> AbstractContextManager[None]:
    """Let ``model`` call the hooks of ``views`` (path -> view) inside the ``with`` block.

    Raises:
        ModuleAttributeError: a module has no result of its own in the graph that runs.
    """
    return own_attribute(model, "forward", partial(_forward_with_hooks(model, views), model))


def _forward_with_hooks(model: GraphModule, views: dict[str, nn.Module]) -> Callable[..., Any]:
    parts = (model._graph, model._code, tuple(views.items()))
    known = vars(model).get(WITH_HOOKS)
    if known is None or known[0] != parts:
        known = vars(model)[WITH_HOOKS] = (parts, _compile(model, views))
    forward: Callable[..., Any] = known[1]
    return forward


def _compile(model: GraphModule, views: dict[str, nn.Module]) -> Callable[..., Any]:
    """Return a forward that computes what ``model`` does, on its state, and calls the hooks of ``views``."""
    graph, copies = Graph(), dict[Node, Node]()
    graph.output(graph.graph_copy(model._graph, copies))
    graph.set_codegen(model._graph._codegen)
    for path, view in views.items():
        calls = _calls_of(model, path)
        if not calls:
            raise _no_place(path, "its op runs in the kernel of another")
        for nodes in calls:
            _insert_calls(graph, view, [copies[node] for node in nodes], copies[_result_of(nodes, path)])
    compiled = GraphModule(nn.Module(), Graph())
    compiled.graph = graph
    forward: Callable[..., Any] = type(compiled).forward
    return forward


def _insert_calls(graph: Graph, view: nn.Module, nodes: list[Node], result: Node) -> None:
    inputs = tuple(_inputs_of(nodes))
    given, returned = tuple(map(metadata.INTEGERS.of, inputs)), metadata.INTEGERS.of(result)
    with graph.inserting_before(nodes[0]):
        graph.call_function(_named(partial(_call_pre_hooks, view, given), "pre_hooks"), inputs)
    with graph.inserting_after(result):
        hooks = partial(_call_hooks, view, (returned, *given))
        seen = graph.call_function(_named(hooks, "hooks"), (result, *inputs))
    metadata.INTEGERS.write(seen, returned)
    result.replace_all_uses_with(seen, delete_user_cb=lambda user: user is not seen and user not in nodes)


def _named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return ``function`` with a name, which torch.fx needs to write code; its exceptions are marked as a
    hook's."""

    def named(*args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:
            vars(error)[OF_A_HOOK] = True
            raise

    named.__name__ = named.__qualname__ = name
    return named


def _as_in_fx(value: Any, qparams: QParams | None) -> Any:
    """Return integers as FX's hooks see them, while torch has such tensors: with their qparams."""
    if not isinstance(qparams, PerTensorQParams) or not AVAILABLE:
        return value
    return of_integers(value, qparams.scale, qparams.zero_point)


def _call_pre_hooks(view: nn.Module, given: tuple[QParams | None, ...], *inputs: Any) -> None:
    inputs = tuple(map(_as_in_fx, inputs, given))
    for key, hook in list(view._forward_pre_hooks.items()):
        with_kwargs = key in view._forward_pre_hooks_with_kwargs
        if (hook(view, inputs, {}) if with_kwargs else hook(view, inputs)) is not None:
            raise ModuleAttributeError.of("TQ970.pre_hook")


def _call_hooks(view: nn.Module, all_qparams: tuple[QParams | None, ...], *values: Any) -> Any:
    result, *others = map(_as_in_fx, values, all_qparams)
    inputs = tuple(others)
    for key, hook in list(view._forward_hooks.items()):
        with_kwargs = key in view._forward_hooks_with_kwargs
        given = hook(view, inputs, {}, result) if with_kwargs else hook(view, inputs, result)
        result = result if given is None else given
    return integers_of(result) if is_quantized(result) else result


def _calls_of(graph_module: GraphModule, path: str) -> list[list[Node]]:
    """Return the nodes of each call of the module at ``path`` that depend on the model's inputs."""
    calls: dict[str, list[Node]] = {}
    for node in graph_module._graph.nodes:
        is_op = node.op == "call_function" and str(node.target) not in BETWEEN
        if is_op and module_path_of(node).partition("@")[0] == path and _depends_on_inputs(node):
            calls.setdefault(list(node.meta["nn_module_stack"])[-1], []).append(node)
    return list(calls.values())


def _result_of(nodes: list[Node], path: str) -> Node:
    """Return the node of ``nodes`` that nodes outside of them read.

    In QAT, an op with a batch norm after it has a scaled weight: its result is that of the batch norm, as for
    FX's fused modules.
    """
    results = [node for node in nodes if any(user not in nodes for user in node.users)]
    if len(results) != 1:
        raise _no_place(path, f"its ops have {len(results)} results")
    node = results[0]
    while len(node.users) == 1 and not module_path_of(user := next(iter(node.users))):
        if user.target not in (ATEN.div.Tensor, ATEN.add.Tensor):
            break
        node = user
    norm = next(iter(node.users), None)
    is_scaled = node is not results[0] and norm is not None and norm.target is BATCH_NORM
    return norm if is_scaled and norm is not None else results[0]


def _inputs_of(nodes: list[Node]) -> Iterator[Node]:
    """Yield each value once that ``nodes`` read and that depends on the model's inputs."""
    matches: dict[Node, None] = {}
    for node in nodes:
        for source in node.all_input_nodes:
            if source not in nodes and _depends_on_inputs(source):
                matches[source] = None
    return iter(matches)


def _depends_on_inputs(node: Node) -> bool:
    return any(item.op == "placeholder" for item in behind([node]))


def _no_place(path: str, why: str) -> ModuleAttributeError:
    return ModuleAttributeError.of("TQ970.hook", path=path, why=why)
