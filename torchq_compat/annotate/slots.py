"""Observation slots: the points of a graph that can carry an observer, and which of them share one.

A slot is a node's output, or an edge into a node. Slots joined into a group get one observer, as FX makes
all inputs and the output of ``cat`` point to the observer of its first input.
"""

from __future__ import annotations

from collections.abc import Iterable

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
        #: The slot whose observer a slot uses; itself for an observer of its own.
        self._observer: dict[Slot, Slot] = {}

    def __contains__(self, slot: Slot) -> bool:
        return slot in self._observer

    def observe(self, slot: Slot, spec: QuantizationSpecBase) -> None:
        """Give ``slot`` an observer of its own, made from ``spec``."""
        self._specs[slot] = spec
        self._observer[slot] = slot

    def share(self, slot: Slot, leader: Slot) -> None:
        """Let ``slot`` use the observer of ``leader``. As in FX this is about ``slot`` alone: others that
        share with it keep the observer they have."""
        self._observer[slot] = self._observer[leader]

    def node_specs(self, nodes: Iterable[Node]) -> dict[Node, NodeSpecs]:
        """The slots as torchao wants them: the first slot of an observer carries the spec, the others point
        to it. torchao makes observers in graph order, edges of a node before its output."""
        decided: dict[Node, NodeSpecs] = {}
        first_with: dict[Slot, Slot] = {}
        for node in nodes:
            specs = NodeSpecs()
            for producer in node.all_input_nodes:
                edge = (producer, node)
                if edge in self._observer:
                    specs.inputs[producer] = self._emit(edge, self._observer[edge], first_with)
            if node in self._observer:
                specs.output = self._emit(node, self._observer[node], first_with)
            if specs:
                decided[node] = specs
        return decided

    def _emit(self, slot: Slot, observer: Slot, first_with: dict[Slot, Slot]) -> QuantizationSpecBase:
        first = first_with.setdefault(observer, slot)
        return self._specs[observer] if first == slot else SharedQuantizationSpec(first)
