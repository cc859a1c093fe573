"""Captures blocks under ``torch.no_grad()`` or autocast as a part of the graph around them, as FX did.

torch.export puts such a block into a submodule behind a higher-order op. No pass inspects the submodule, so
nothing in it would be quantized, and torchao after 0.18 refuses graphs with such a block.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode

from torchq_compat.ops import written_by
from torchq_compat.support import metadata
from torchq_compat.support.graph_nodes import nodes_behind
from torchq_compat.support.metadata import CUSTOM
from torchq_compat.support.process_state import own_attribute
from torchq_compat.support.upstream import function_modes


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
    casts: bool = False


class Blocks:
    """Hides blocks from torch.export. Autocast is lost, as in FX: ops run in the dtype of their inputs.

    Attributes:
        seen: the blocks of the last capture.
    """

    def __init__(self) -> None:
        self.seen: dict[Block, None] = {}

    @contextmanager
    def inlined(self) -> Iterator[None]:
        """Inline the blocks of the model that runs."""
        mode = next((m for m in function_modes() if isinstance(m, PreDispatchTorchFunctionMode)), None)
        if mode is None:
            yield
            return
        self.seen.clear()
        graph, see, around = mode.tracer.graph, mode.__torch_function__, torch.is_grad_enabled()
        #: The last node in front of each open block, and the name of its context.
        opened: list[tuple[Node, str, bool]] = []

        def open_block(context: str, *, casts: bool = False) -> None:
            opened.append((next(reversed(graph.nodes)), context, casts))

        def close_block() -> None:
            last, context, casts = opened.pop()
            nodes = [node for node in nodes_behind(last) if node.op == "call_function"]
            if nodes:
                self.seen[Block(_path_of(nodes), context, casts)] = None
            for node in nodes if context == "torch.no_grad" else ():
                node.meta[CUSTOM] = {**(node.meta.get(CUSTOM) or {}), metadata.WITHOUT_GRADIENT.name: True}

        def switched(_mode: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.amp.autocast_mode._enter_autocast:
                open_block("torch.autocast", casts=args[2])
                torch.set_autocast_enabled(args[0], False)
            elif function is torch.amp.autocast_mode._exit_autocast:
                close_block()
            elif function is torch._C._set_grad_enabled:
                if opened and opened[-1][1] != "torch.autocast":
                    close_block()
                function(*args)
                if bool(args[0]) != around:
                    open_block("torch.enable_grad" if args[0] else "torch.no_grad")
            else:
                return see(function, types, args, kwargs)
            return None

        with own_attribute(mode, "__torch_function__", MethodType(switched, mode)):
            yield
            while opened:
                close_block()


def _path_of(nodes: list[Node]) -> str:
    """Return the path of the innermost module around all of ``nodes``."""
    stacks = [node.meta.get("nn_module_stack") or {} for node in nodes]
    paths = [[str(fqn) for fqn, _ in stack.values()] for stack in stacks if stack]
    common = [path for path in paths[0] if all(path in other for other in paths)] if paths else [""]
    return common[-1] if common else ""


def detach_writes(graph_module: GraphModule) -> None:
    """Detach what is written into buffers in blocks without gradients: the next step of training would go
    back through this one."""
    for node in list(graph_module.graph.nodes):
        custom = dict(node.meta.get(CUSTOM) or {})
        if custom.pop(metadata.WITHOUT_GRADIENT.name, False):
            node.meta[CUSTOM] = custom
            _detach_what_is_written(node)


def _detach_what_is_written(node: Node) -> None:
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
