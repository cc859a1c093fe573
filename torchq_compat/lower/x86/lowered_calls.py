"""Lower the opaque modules that a graph calls, each by the handler of its kind.

A converted model that is itself an opaque module (a standalone module) is lowered like the model around it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from torchq_compat.custom_modules.loops.opaque_loop import OpaqueLoop
from torchq_compat.custom_modules.parts.part_owner import PartOwner
from torchq_compat.custom_modules.registry import handler_of
from torchq_compat.graph.graph_module import ConvertedGraphModule, QuantizationGraphModule
from torchq_compat.graph.quantized_interface import quantize_inputs
from torchq_compat.lower.x86.compiled.compiled_graph import compiled_graph
from torchq_compat.lower.x86.compiled.region_operator import RegionTable
from torchq_compat.lower.x86.lowered_parts import with_lowered_graphs
from torchq_compat.opaque_calls.insert_calls import opaque_call_nodes
from torchq_compat.opaque_calls.opaque_module import OpaqueModule
from torchq_compat.qspecs.qparams import QParams
from torchq_compat.support.decisions import Action, Decision

__all__ = ["LoweredOpaqueModule", "lower_opaque_modules"]

#: Lower a nested converted model; return the lowered model and the decisions about it.
LowerInside = Callable[[ConvertedGraphModule], tuple[QuantizationGraphModule, tuple[Decision, ...]]]


@dataclass(frozen=True)
class LoweredOpaqueModule:
    """The lowered form of the opaque module at ``path``.

    Attributes:
        module: None if it is not lowered.
        is_for_compiler: whether torch.compile sees integer kernels in ``module``.
    """

    path: str
    module: OpaqueModule | None
    decisions: tuple[Decision, ...]
    is_for_compiler: bool = False

    @property
    def name(self) -> str:
        """The name of ``module`` in the lowered model, unique for each path; the opaque module at ``path``
        keeps the state."""
        return self.path.replace("_", "_u").replace(".", "_d")


class OpaqueLoweredModel(OpaqueModule):
    """A lowered model that another graph calls."""

    def __init__(
        self, opaque: OpaqueModule, model: QuantizationGraphModule, input_qparams: tuple[QParams | None, ...]
    ):
        super().__init__()
        self.opaque_layouts = list(opaque.opaque_layouts)
        self.model = model
        self.input_qparams = input_qparams

    def opaque_call(self, *args: Any, **kwargs: Any) -> Any:
        bound = self.model.record.signature.bind(args, kwargs)
        return self.model(*quantize_inputs(bound, self.input_qparams))

    def opaque_hand_out(self, result: Tensor, qparams: QParams | None) -> Tensor:
        """Return ``result`` unchanged: quantized results are integers already."""
        return result


def lower_opaque_modules(
    reference: ConvertedGraphModule, lower_inside: LowerInside, table: RegionTable
) -> list[LoweredOpaqueModule]:
    """Lower every opaque module that ``reference`` calls; ``reference`` stays as it is.

    Args:
        table: the regions of kernels that torch.compile sees inside the modules are added to it.
    """
    found = []
    for path in {str(call.target): None for call in opaque_call_nodes(reference)}:
        opaque = reference.get_submodule(path)
        assert isinstance(opaque, OpaqueModule)
        regions_before = len(table.regions)
        if isinstance(opaque, ConvertedGraphModule):
            lowered = _lower_model(path, opaque, lower_inside)
        elif isinstance(opaque, OpaqueLoop):
            lowered = _lower_loop(path, opaque, lower_inside)
        else:
            lowered = _lower_by_its_kind(path, opaque, table)
        found.append(replace(lowered, is_for_compiler=len(table.regions) > regions_before))
    return found


def _lower_model(path: str, opaque: Any, lower_inside: LowerInside) -> LoweredOpaqueModule:
    model, inside = lower_inside(opaque)
    decision = Decision(
        f"{path}/lowering", "standalone module", Action.LOWERED, "is lowered as a model of its own"
    )
    decisions = (decision, *(replace(each, path=f"{path}.{each.path}") for each in inside))
    return LoweredOpaqueModule(path, OpaqueLoweredModel(opaque, model, opaque.input_qparams()), decisions)


def _lower_loop(path: str, loop: OpaqueLoop, lower_inside: LowerInside) -> LoweredOpaqueModule:
    assert isinstance(loop.step, ConvertedGraphModule)
    step, inside = lower_inside(loop.step)
    decision = Decision(
        f"{path}/lowering", "loop over time", Action.LOWERED, "its step is lowered as a model"
    )
    return LoweredOpaqueModule(path, loop.with_step(step), (decision, *inside))


def _lower_by_its_kind(path: str, opaque: OpaqueModule, table: RegionTable) -> LoweredOpaqueModule:
    handler = handler_of(opaque)
    if handler is not None and handler.lowers_graphs and isinstance(opaque, PartOwner):
        compiled_form = partial(compiled_graph, table=table)
        return LoweredOpaqueModule(path, *with_lowered_graphs(opaque, path, compiled_form))
    made = "its kind is unknown" if handler is None else handler.lower(opaque)
    if isinstance(made, str):
        reason = f"runs as in the reference graph: {made}"
        return LoweredOpaqueModule(path, None, (_decision(path, opaque, Action.REFERENCE, reason),))
    reason = "runs on the integer kernels of its kind"
    return LoweredOpaqueModule(path, made, (_decision(path, opaque, Action.LOWERED, reason),))


def _decision(path: str, opaque: OpaqueModule, action: Action, reason: str) -> Decision:
    return Decision(f"{path}/lowering", type(opaque).__name__, action, reason)
