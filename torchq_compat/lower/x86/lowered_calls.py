"""Leaf modules of a lowered graph: what their kind makes of them, or what they were.

A converted model that is a leaf itself (a standalone module) is lowered like the model around it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from torchq_compat.custom_modules.parts.part_owner import PartOwner
from torchq_compat.custom_modules.registry import handler_of
from torchq_compat.graph.graph_module import ConvertedGraphModule, QuantizationGraphModule
from torchq_compat.graph.quantized_interface import quantize_inputs
from torchq_compat.lower.x86.lowered_parts import with_lowered_graphs
from torchq_compat.opaque_calls.insert_calls import leaf_nodes
from torchq_compat.opaque_calls.opaque_module import LeafModule
from torchq_compat.qspecs.qparams import Grid
from torchq_compat.support.decisions import Action, Decision

__all__ = ["LoweredLeaf", "lower_leaves"]

#: Lowers a converted model inside; gives the model and the decisions about it.
LowerInside = Callable[[ConvertedGraphModule], tuple[QuantizationGraphModule, tuple[Decision, ...]]]


@dataclass(frozen=True)
class LoweredLeaf:
    """What became of the leaf at ``path``: ``module`` is None where it stays as it is."""

    path: str
    module: LeafModule | None
    decisions: tuple[Decision, ...]

    @property
    def name(self) -> str:
        """The name of ``module`` in the lowered model, where the leaf at ``path`` keeps the state; another
        for every path."""
        return self.path.replace("_", "_u").replace(".", "_d")


class LoweredModelLeaf(LeafModule):
    """A lowered model that another graph calls."""

    def __init__(self, leaf: LeafModule, model: QuantizationGraphModule, grids: tuple[Grid | None, ...]):
        super().__init__()
        self.leaf_layouts = list(leaf.leaf_layouts)
        self.model = model
        self.grids = grids

    def leaf_call(self, *args: Any, **kwargs: Any) -> Any:
        bound = self.model.record.signature.bind(args, kwargs)
        return self.model(*quantize_inputs(bound, self.grids))

    def leaf_hand_out(self, result: Tensor, grid: Grid | None) -> Tensor:
        """Results on a grid are integers already."""
        return result


def lower_leaves(reference: ConvertedGraphModule, lower_inside: LowerInside) -> list[LoweredLeaf]:
    """Lower every leaf that ``reference`` calls; ``reference`` stays as it is."""
    found = []
    for path in {str(call.target): None for call in leaf_nodes(reference)}:
        leaf = reference.get_submodule(path)
        assert isinstance(leaf, LeafModule)
        if isinstance(leaf, ConvertedGraphModule):
            found.append(_lower_model(path, leaf, lower_inside))
        else:
            found.append(_lower_by_its_kind(path, leaf))
    return found


def _lower_model(path: str, leaf: Any, lower_inside: LowerInside) -> LoweredLeaf:
    model, inside = lower_inside(leaf)
    decision = Decision(
        f"{path}/lowering", "standalone module", Action.LOWERED, "is lowered as a model of its own"
    )
    decisions = (decision, *(replace(each, path=f"{path}.{each.path}") for each in inside))
    return LoweredLeaf(path, LoweredModelLeaf(leaf, model, leaf.input_grids()), decisions)


def _lower_by_its_kind(path: str, leaf: LeafModule) -> LoweredLeaf:
    handler = handler_of(leaf)
    if handler is not None and handler.lowers_graphs and isinstance(leaf, PartOwner):
        return LoweredLeaf(path, *with_lowered_graphs(leaf, path))
    made = "its kind is unknown" if handler is None else handler.lower(leaf)
    if isinstance(made, str):
        reason = f"runs as in the reference graph: {made}"
        return LoweredLeaf(path, None, (_decision(path, leaf, Action.REFERENCE, reason),))
    reason = "runs on the integer kernels of its kind"
    return LoweredLeaf(path, made, (_decision(path, leaf, Action.LOWERED, reason),))


def _decision(path: str, leaf: LeafModule, action: Action, reason: str) -> Decision:
    return Decision(f"{path}/lowering", type(leaf).__name__, action, reason)
