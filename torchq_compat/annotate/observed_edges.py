"""Observation slots: the points of a graph that can carry an observer, and which of them share one.

A slot is a node's output, or an edge into a node. Slots joined into a group get one observer, as FX makes
all inputs and the output of ``cat`` point to the observer of its first input.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import Node
from torchao.quantization.pt2e.quantizer import SharedQuantizationSpec
from torchao.quantization.pt2e.quantizer.quantizer import QuantizationSpecBase

from torchq_compat.annotate.annotation import NodeSpecs

__all__ = ["Slot", "Slots"]

#: A node for its output, (producer, consumer) for an edge: torchao's EdgeOrNode.
Slot = Node | tuple[Node, Node]


class Slots:
    """Specs by slot, and the groups of slots that share an observer."""

    def __init__(self) -> None:
        self._specs: dict[Slot, QuantizationSpecBase] = {}
        #: The first of the edges from one node that FX leads through one observer node.
        self._joined_with: dict[Slot, Slot] = {}
        #: The slot whose observer a slot uses; itself for an observer of its own.
        self._observer: dict[Slot, Slot] = {}

    def __contains__(self, slot: Slot) -> bool:
        return self._first(slot) in self._observer

    def observe(self, slot: Slot, spec: QuantizationSpecBase) -> None:
        """Give ``slot`` an observer of its own, made from ``spec``."""
        self._specs[slot] = spec
        self._observer[slot] = slot

    def join(self, edge: Slot, other: Slot) -> None:
        """Let ``edge`` use the observer of ``other``, an edge from the same node, from now on: where one of
        them comes to share the observer of something else, so does the other."""
        self._joined_with[edge] = self._first(other)

    def share(self, slot: Slot, leader: Slot) -> None:
        """Let ``slot`` use the observer of ``leader``. As in FX this is about ``slot`` alone, and the edges
        joined with it: others that share with it keep the observer they have."""
        self._observer[self._first(slot)] = self._observer[self._first(leader)]

    def dtype_at(self, slot: Slot) -> torch.dtype | None:
        """What the observer of ``slot`` quantizes to; None where its spec does not say."""
        return getattr(self._specs[self._observer[self._first(slot)]], "dtype", None)

    def node_specs(self, nodes: Iterable[Node]) -> dict[Node, NodeSpecs]:
        """The slots as torchao wants them: the first slot of an observer carries the spec, the others point
        to it. torchao makes observers in graph order, edges of a node before its output."""
        decided: dict[Node, NodeSpecs] = {}
        first_with: dict[Slot, Slot] = {}
        for node in nodes:
            specs = NodeSpecs()
            for producer in node.all_input_nodes:
                edge = (producer, node)
                if edge in self:
                    specs.inputs[producer] = self._emit(edge, self._observer[self._first(edge)], first_with)
            if node in self._observer:
                specs.output = self._emit(node, self._observer[node], first_with)
            if specs:
                decided[node] = specs
        return decided

    def _first(self, slot: Slot) -> Slot:
        return self._joined_with.get(slot, slot)

    def _emit(self, slot: Slot, observer: Slot, first_with: dict[Slot, Slot]) -> QuantizationSpecBase:
        first = first_with.setdefault(observer, slot)
        return self._specs[observer] if first == slot else SharedQuantizationSpec(first)
