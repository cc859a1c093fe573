"""Writes nodes in the place of another one, with the example values that quantizers look at."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from torchq_compat.support import metadata
from torchq_compat.support.upstream import FakeTensorMode

__all__ = ["ATEN", "NodeWriter"]

ATEN = torch.ops.aten


class NodeWriter:
    """Inserts nodes before ``place``; they carry its origin (module stack, stack trace)."""

    def __init__(self, graph_module: GraphModule, place: Node) -> None:
        self.graph_module = graph_module
        self.graph = graph_module.graph
        self.place = place
        self.fake_mode: FakeTensorMode = place.meta["val"][0].fake_mode

    def call(self, target: Any, *args: Any, value: Any = None, **meta: Any) -> Node:
        """Return a call of ``target``; ``value`` is its example value, computed when it is not given."""
        with self.graph.inserting_before(self.place):
            node = self.graph.call_function(target, args)
        if value is None:
            with self.fake_mode, torch.no_grad():
                value = target(*map_arg(args, lambda argument: argument.meta["val"]))
        return self._mark(node, value, meta)

    def glue(self, target: Any, *args: Any, value: Any = None) -> Node:
        """Return a call that moves values."""
        return self.call(target, *args, value=value, **{metadata.GLUE.name: True})

    def getitem(self, source: Node, index: int) -> Node:
        """Return the result ``index`` of ``source``."""
        return self.glue(operator.getitem, source, index)

    def attribute(self, path: str, value: torch.Tensor) -> Node:
        """Return a get_attr of the parameter at ``path``."""
        with self.graph.inserting_before(self.place):
            node = self.graph.get_attr(path)
        return self._mark(node, self.fake_mode.from_tensor(value.detach(), static_shapes=True), {})

    def body(self, name: str, module: GraphModule) -> Node:
        """Return a get_attr of the graph ``module``, placed at the top level under ``name``."""
        self.graph_module.add_submodule(name, module)
        with self.graph.inserting_before(self.place):
            return self.graph.get_attr(name)

    def module(self, name: str, module: nn.Module, *args: Node) -> Node:
        """Return a call of ``module``, placed at the top level under ``name``, with the results of
        ``place``."""
        self.graph_module.add_submodule(name, module)
        with self.graph.inserting_before(self.place):
            node = self.graph.call_module(name, args)
        return self._mark(node, self.place.meta["val"], {})

    def _mark(self, node: Node, value: Any, meta: dict[str, Any]) -> Node:
        node.meta = {**self.place.meta, **meta, "val": value}
        return node
