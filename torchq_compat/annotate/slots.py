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
        self._leader: dict[Slot, Slot] = {}

    def __contains__(self, slot: Slot) -> bool:
        return slot in self._specs

    def observe(self, slot: Slot, spec: QuantizationSpecBase) -> None:
        """Give ``slot`` an observer made from ``spec``."""
        self._specs[slot] = spec
        self._leader[slot] = slot

    def share(self, slot: Slot, leader: Slot) -> None:
        """Let ``slot``, and all that share with it, use the observer of ``leader``."""
        root = self._root(leader)
        spec = self._specs[root]
        if slot in self._specs:
            self._leader[self._root(slot)] = root
        else:
            self._leader[slot] = root
        self._specs[slot] = spec

    def node_specs(self, nodes: Iterable[Node]) -> dict[Node, NodeSpecs]:
        """The slots as torchao wants them: the first slot of a group carries the spec, the others point
        to it. torchao makes observers in graph order, edges of a node before its output."""
        decided: dict[Node, NodeSpecs] = {}
        first_of_group: dict[Slot, Slot] = {}
        for node in nodes:
            specs = NodeSpecs()
            for producer in node.all_input_nodes:
                if (producer, node) in self._specs:
                    specs.inputs[producer] = self._emit((producer, node), first_of_group)
            if node in self._specs:
                specs.output = self._emit(node, first_of_group)
            if specs:
                decided[node] = specs
        return decided

    def _emit(self, slot: Slot, first_of_group: dict[Slot, Slot]) -> QuantizationSpecBase:
        root = self._root(slot)
        first = first_of_group.setdefault(root, slot)
        return self._specs[root] if first == slot else SharedQuantizationSpec(first)

    def _root(self, slot: Slot) -> Slot:
        while self._leader[slot] != slot:
            slot = self._leader[slot]
        return slot
