"""Lower the opaque modules that a graph calls, each by the handler of its kind.

A converted model that is itself an opaque module (a standalone module) is lowered like the model around it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.fx import Graph, GraphModule

from torchq_compat.custom_modules.loops.opaque_loop import OpaqueLoop
from torchq_compat.custom_modules.parts.part_owner import PartOwner
from torchq_compat.custom_modules.registry import handler_of
from torchq_compat.graph.graph_module import ConvertedGraphModule, QuantizationGraphModule
from torchq_compat.lower.integers.lowered_graph import MADE, Made, share_state, with_modules
from torchq_compat.lower.integers.rewrite import Rewriter
from torchq_compat.opaque_calls.insert_calls import opaque_call_nodes
from torchq_compat.opaque_calls.opaque_module import OpaqueModule
from torchq_compat.support.decisions import Action, Decision

__all__ = ["LoweredOpaqueModule", "lower_opaque_modules"]

#: Lower a nested converted model; return the lowered model and the decisions about it.
LowerInside = Callable[[ConvertedGraphModule], tuple[QuantizationGraphModule, tuple[Decision, ...]]]


@dataclass(frozen=True)
class LoweredOpaqueModule:
    """The lowered form of the opaque module at ``path``; ``module`` is None if it is not lowered."""

    path: str
    module: OpaqueModule | None
    decisions: tuple[Decision, ...]


def lower_opaque_modules(
    reference: ConvertedGraphModule, lower_inside: LowerInside
) -> list[LoweredOpaqueModule]:
    """Lower every opaque module that ``reference`` calls; ``reference`` stays as it is."""
    found = []
    for path in {str(call.target): None for call in opaque_call_nodes(reference)}:
        opaque = reference.get_submodule(path)
        assert isinstance(opaque, OpaqueModule)
        if isinstance(opaque, ConvertedGraphModule):
            found.append(_lower_model(path, opaque, lower_inside))
        elif isinstance(opaque, OpaqueLoop):
            found.append(_lower_loop(path, opaque, lower_inside))
        else:
            found.append(_lower_by_its_kind(path, opaque))
    return found


def _lower_model(path: str, opaque: Any, lower_inside: LowerInside) -> LoweredOpaqueModule:
    lowered, inside = lower_inside(opaque)
    decision = Decision(
        f"{path}/lowering", "standalone module", Action.LOWERED, "is lowered as a model of its own"
    )
    decisions = (decision, *(replace(each, path=f"{path}.{each.path}") for each in inside))
    assert isinstance(lowered, OpaqueModule)
    return LoweredOpaqueModule(path, lowered, decisions)


def _lower_loop(path: str, loop: OpaqueLoop, lower_inside: LowerInside) -> LoweredOpaqueModule:
    assert isinstance(loop.step, ConvertedGraphModule)
    step, inside = lower_inside(loop.step)
    decision = Decision(
        f"{path}/lowering", "loop over time", Action.LOWERED, "its step is lowered as a model"
    )
    return LoweredOpaqueModule(path, loop.with_step(step), (decision, *inside))


def _lower_by_its_kind(path: str, opaque: OpaqueModule) -> LoweredOpaqueModule:
    handler = handler_of(opaque)
    if handler is not None and handler.lowers_graphs and isinstance(opaque, PartOwner):
        return LoweredOpaqueModule(path, *_with_lowered_graphs(opaque, path))
    made = "its kind is unknown" if handler is None else handler.lower(opaque)
    if isinstance(made, str):
        reason = f"runs as in the reference graph: {made}"
        return LoweredOpaqueModule(path, None, (_decision(path, opaque, Action.REFERENCE, reason),))
    reason = "runs on the integer kernels of its kind"
    return LoweredOpaqueModule(path, made, (_decision(path, opaque, Action.LOWERED, reason),))


def _with_lowered_graphs(opaque: PartOwner, path: str) -> tuple[PartOwner, tuple[Decision, ...]]:
    """Return a copy of ``opaque`` whose graphs are lowered, and the decisions about them; it calls them as it
    called its q-dq graphs, and shares its state."""
    decisions: list[Decision] = []
    made: dict[str, nn.Module] = {}
    for name, graph in opaque.graphs():
        rewriter = Rewriter(graph, opaque.named_input_qparams(), {}, {})
        rewriter.run()
        decisions += [
            replace(each, path=f"{path}.{name}/{each.node}", node="") for each in rewriter.decisions()
        ]
        module = GraphModule(nn.Module(), Graph())
        share_state(module, graph)
        vars(module)["_modules"] = {**module._modules, MADE: Made(rewriter.lowered.constants)}
        module.graph = rewriter.lowered.graph
        made[name] = module
    lowered = type(opaque).__new__(type(opaque))
    vars(lowered).update(vars(opaque))
    vars(lowered)["_modules"] = with_modules(opaque, made)
    return lowered, tuple(decisions)


def _decision(path: str, opaque: OpaqueModule, action: Action, reason: str) -> Decision:
    return Decision(f"{path}/lowering", type(opaque).__name__, action, reason)
