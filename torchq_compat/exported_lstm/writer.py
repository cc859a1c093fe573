"""Writes nodes that replace another node, with the example values that quantizers inspect."""

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
    """Inserts nodes before the node ``place``, with its origin metadata (module stack, stack trace)."""

    def __init__(self, graph_module: GraphModule, place: Node) -> None:
        self.graph_module = graph_module
        self.graph = graph_module.graph
        self.place = place
        self.fake_mode: FakeTensorMode = place.meta["val"][0].fake_mode

    def call(self, target: Any, *args: Any, value: Any = None, **meta: Any) -> Node:
        """Insert a call of ``target``; ``value`` is its example value, computed if it is not given."""
        with self.graph.inserting_before(self.place):
            node = self.graph.call_function(target, args)
        if value is None:
            with self.fake_mode, torch.no_grad():
                value = target(*map_arg(args, lambda argument: argument.meta["val"]))
        return self._mark(node, value, meta)

    def glue(self, target: Any, *args: Any, value: Any = None) -> Node:
        """Insert a call that only moves values."""
        return self.call(target, *args, value=value, **{metadata.GLUE.name: True})

    def getitem(self, source: Node, index: int) -> Node:
        """Insert a getitem of the result ``index`` of ``source``."""
        return self.glue(operator.getitem, source, index)

    def attribute(self, path: str, value: torch.Tensor) -> Node:
        """Insert a get_attr of the parameter at ``path``, whose value is ``value``."""
        with self.graph.inserting_before(self.place):
            node = self.graph.get_attr(path)
        return self._mark(node, self.fake_mode.from_tensor(value.detach(), static_shapes=True), {})

    def body(self, name: str, module: GraphModule) -> Node:
        """Add the graph ``module`` at the top level under ``name``, and insert a get_attr of it."""
        self.graph_module.add_submodule(name, module)
        with self.graph.inserting_before(self.place):
            return self.graph.get_attr(name)

    def module(self, name: str, module: nn.Module, *args: Node) -> Node:
        """Add ``module`` at the top level under ``name``, and insert a call of it whose results are like
        those of ``place``."""
        self.graph_module.add_submodule(name, module)
        with self.graph.inserting_before(self.place):
            node = self.graph.call_module(name, args)
        return self._mark(node, self.place.meta["val"], {})

    def _mark(self, node: Node, value: Any, meta: dict[str, Any]) -> Node:
        node.meta = {**self.place.meta, **meta, "val": value}
        return node
