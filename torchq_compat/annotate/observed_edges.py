"""Observed edges and nodes of a graph, and which of them share an observer.

An edge leads into a node; a node means its output. Edges and nodes that share use one observer, as FX makes
all inputs and the output of ``cat`` use the observer of its first input.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import Node
from torchao.quantization.pt2e.quantizer import SharedQuantizationSpec
from torchao.quantization.pt2e.quantizer.quantizer import QuantizationSpecBase

from torchq_compat.annotate.annotation import NodeSpecs

__all__ = ["EdgeOrNode", "ObservedEdges"]

#: A node for its output, (producer, consumer) for an edge: torchao's EdgeOrNode.
EdgeOrNode = Node | tuple[Node, Node]


class ObservedEdges:
    """Specs by edge or node, and which of them share an observer."""

    def __init__(self) -> None:
        self._specs: dict[EdgeOrNode, QuantizationSpecBase] = {}
        #: Edge -> the first edge from the same node, if FX routes both through one observer node.
        self._joined_with: dict[EdgeOrNode, EdgeOrNode] = {}
        #: Edge or node -> the edge or node whose observer it uses; itself if it has its own.
        self._observer: dict[EdgeOrNode, EdgeOrNode] = {}

    def __contains__(self, edge_or_node: EdgeOrNode) -> bool:
        return self._first(edge_or_node) in self._observer

    def observe(self, edge_or_node: EdgeOrNode, spec: QuantizationSpecBase) -> None:
        """Give ``edge_or_node`` an observer of its own, made from ``spec``."""
        self._specs[edge_or_node] = spec
        self._observer[edge_or_node] = edge_or_node

    def join(self, edge: EdgeOrNode, other: EdgeOrNode) -> None:
        """Make ``edge`` always use the observer of ``other``, an edge from the same node: if one of them
        later shares the observer of something else, so does the other."""
        self._joined_with[edge] = self._first(other)

    def share(self, edge_or_node: EdgeOrNode, leader: EdgeOrNode) -> None:
        """Make ``edge_or_node`` use the observer of ``leader``. As in FX this changes only ``edge_or_node``
        and the edges joined with it: edges and nodes that share its old observer keep that one."""
        self._observer[self._first(edge_or_node)] = self._observer[self._first(leader)]

    def use_one(self, edge_or_node: EdgeOrNode, other: EdgeOrNode) -> bool:
        """Return whether ``edge_or_node`` and ``other`` use one observer."""
        return self._observer[self._first(edge_or_node)] == self._observer[self._first(other)]

    def dtype_at(self, edge_or_node: EdgeOrNode) -> torch.dtype | None:
        """Return the dtype that the observer of ``edge_or_node`` quantizes to, or None."""
        return getattr(self._specs[self._observer[self._first(edge_or_node)]], "dtype", None)

    def node_specs(self, nodes: Iterable[Node]) -> dict[Node, NodeSpecs]:
        """Return the specs in torchao's form: the first edge or node of an observer has the spec, and the
        others refer to it. torchao makes observers in graph order, for the edges of a node before its
        output."""
        decided: dict[Node, NodeSpecs] = {}
        first_with: dict[EdgeOrNode, EdgeOrNode] = {}
        for node in nodes:
            specs = NodeSpecs()
            for producer in node.all_input_nodes:
                edge = (producer, node)
                if edge in self:
                    specs.inputs[producer] = self._spec_at(
                        edge, self._observer[self._first(edge)], first_with
                    )
            if node in self._observer:
                specs.output = self._spec_at(node, self._observer[node], first_with)
            if specs:
                decided[node] = specs
        return decided

    def _first(self, edge_or_node: EdgeOrNode) -> EdgeOrNode:
        return self._joined_with.get(edge_or_node, edge_or_node)

    def _spec_at(
        self, edge_or_node: EdgeOrNode, observer: EdgeOrNode, first_with: dict[EdgeOrNode, EdgeOrNode]
    ) -> QuantizationSpecBase:
        first = first_with.setdefault(observer, edge_or_node)
        return self._specs[observer] if first == edge_or_node else SharedQuantizationSpec(first)
