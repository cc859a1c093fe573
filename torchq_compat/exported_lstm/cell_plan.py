"""Plans what a quantizer observes in one cell, and which edges and nodes share an observer.

torchao prepares a copy of the cell with the quantizer, and its callback reports which edge or node got which
observer. So torchao's sharing rules apply, independent of the graph around the cell.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.quantizer import DerivedQuantizationSpec, Quantizer, SharedQuantizationSpec
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from torchq_compat.annotate.wrapping_quantizer import WrappingQuantizer
from torchq_compat.support.torchao_flow import prepare_pt2e

__all__ = ["CellPlan", "EdgeOrNodeName", "plan_cell"]


class EdgeOrNodeName(NamedTuple):
    """An edge or node of a cell, by name, so that it can be found in a copy of the cell.

    ``position`` is an index into the input nodes of ``node``; None means its output.
    """

    node: str
    position: int | None


@dataclass(frozen=True)
class CellPlan:
    """The observed places, in the order in which torchao makes observers.

    Attributes:
        leader: for each place the first place with the same observer, which may be the place itself.
        specs: the specs of the leaders. A derived spec refers to places.
    """

    leader: dict[EdgeOrNodeName, EdgeOrNodeName]
    specs: dict[EdgeOrNodeName, Any]

    def spec(self, place: EdgeOrNodeName, point: Callable[[EdgeOrNodeName], Any], *, first: bool) -> Any:
        """Return the spec of ``place`` in a copy of the cell.

        Args:
            point: place -> the edge or node in the first copy.
            first: whether the copy is the first one; later copies share its observers.
        """
        leader = self.leader[place]
        if not first or leader != place:
            return SharedQuantizationSpec(point(leader))
        spec = self.specs[place]
        if isinstance(spec, DerivedQuantizationSpec):
            return replace(spec, derived_from=[point(source) for source in spec.derived_from])
        return spec


def plan_cell(cell: GraphModule, quantizer: Quantizer) -> CellPlan:
    """Return the plan of what ``quantizer`` observes in ``cell``, which is not changed."""
    recorder = _Recorder(quantizer)
    prepare_pt2e(copy.deepcopy(cell), recorder)
    return recorder.plan


class _Recorder(WrappingQuantizer):
    """Annotates with ``quantizer``, and records the observers that torchao makes from the annotations."""

    plan: CellPlan

    def prepare_obs_or_fq_callback(self, model: GraphModule, observers: dict[Any, Any]) -> None:
        first_with: dict[int, EdgeOrNodeName] = {}
        leader: dict[EdgeOrNodeName, EdgeOrNodeName] = {}
        specs: dict[EdgeOrNodeName, Any] = {}
        for point, observer in observers.items():
            if observer is None:
                continue
            place = _place(point)
            leader[place] = first_with.setdefault(id(observer), place)
            if leader[place] == place:
                specs[place] = _by_place(_spec(point))
        self.plan = CellPlan(leader, specs)


def _place(point: Node | tuple[Node, Node]) -> EdgeOrNodeName:
    if isinstance(point, Node):
        return EdgeOrNodeName(point.name, None)
    source, node = point
    return EdgeOrNodeName(node.name, node.all_input_nodes.index(source))


def _spec(point: Node | tuple[Node, Node]) -> Any:
    if isinstance(point, Node):
        return point.meta[Q_ANNOTATION_KEY].output_qspec
    source, node = point
    return node.meta[Q_ANNOTATION_KEY].input_qspec_map[source]


def _by_place(spec: Any) -> Any:
    if isinstance(spec, DerivedQuantizationSpec):
        return replace(spec, derived_from=[_place(point) for point in spec.derived_from])
    return spec
