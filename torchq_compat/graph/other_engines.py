"""Keep other engines from preparing, converting or tracing the models of this package.

FX's ``convert_fx`` and torchao's ``convert_pt2e`` accept any GraphModule whose ``meta`` has what a prepare
wrote. In a model prepared by this package they would silently leave custom modules observed and batch norms
unfolded: a half-ported script would go on with a float model.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch.fx import GraphModule, Tracer

from torchq_compat.errors import ConvertError
from torchq_compat.graph.numeric_suite import refuse_numeric_suite
from torchq_compat.support.torch_ao import FX_ENGINE, QuantizationTracer
from torchq_compat.support.upstream import get_node_name_to_scope

__all__ = ["OBSERVED_KEY", "guard", "refuse_fx_tracer", "refuse_torchao_prepare", "unguard"]

#: The key of ``GraphModule.meta`` that torch.ao's and torchao's prepare write, and their convert reads first.
OBSERVED_KEY = "_observed_graph_module_attrs"
CALLERS_OF_TRACE = 4


def guard(graph_module: GraphModule, stage: str) -> None:
    """Make every other convert fail on ``graph_module`` with a ConvertError."""
    kept = graph_module.meta.get(OBSERVED_KEY)
    if not isinstance(kept, _Guard):
        graph_module.meta[OBSERVED_KEY] = _Guard(kept, stage)


def unguard(graph_module: GraphModule) -> None:
    """Undo ``guard``, before this package passes the model to torchao."""
    kept = graph_module.meta.get(OBSERVED_KEY)
    if isinstance(kept, _Guard):
        graph_module.meta[OBSERVED_KEY] = vars(kept)["kept"]
        if vars(kept)["kept"] is None:
            del graph_module.meta[OBSERVED_KEY]


def refuse_fx_tracer(stage: str) -> None:
    """Raise if FX's prepare or fuse is the caller; called from a method that torch.fx's tracers call first.

    Raises:
        ConvertError: FX's ``prepare_fx`` or ``fuse_fx`` was given a model of this package.
        FxError: the Numeric Suite was given a model of this package.
    """
    frame: FrameType | None = sys._getframe(2)
    if isinstance(frame and frame.f_locals.get("self"), Tracer):
        refuse_numeric_suite(frame and frame.f_back)
    if frame is not None and isinstance(frame.f_locals.get("self"), QuantizationTracer):
        raise _other_engine(stage)
    # fuse_fx calls the tracer through torch.fx.symbolic_trace.
    for _ in range(CALLERS_OF_TRACE):
        if frame is None:
            return
        if frame.f_globals.get("__name__") == FX_ENGINE:
            raise _other_engine(stage)
        frame = frame.f_back


def refuse_torchao_prepare(stage: str) -> None:
    """Raise if torchao's prepare is the caller; called where the graph of a model is read.

    Raises:
        ConvertError: ``prepare_pt2e`` or ``prepare_qat_pt2e`` was given a model of this package.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("torchq_compat."):
        frame = frame.f_back
    # This is the function of torchao's prepare that reads the graph first (torchao 0.18).
    if frame is not None and frame.f_code is get_node_name_to_scope.__code__:
        raise _other_engine(stage)


class _Guard:
    """A stand-in for the value that torchao's prepare left; reading any attribute raises a ConvertError."""

    #: torchao's convert reads this of every submodule; a standalone module is one, and is converted before.
    is_observed_standalone_module = False

    def __init__(self, kept: Any, stage: str) -> None:
        self.kept = kept
        self.stage = stage

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__") or name == "is_observed_standalone_module":
            return object.__getattribute__(self, name)
        raise _other_engine(vars(self)["stage"])


def _other_engine(stage: str) -> ConvertError:
    return ConvertError(
        f"this model was {stage} by torchq_compat: torch.ao's and torchao's functions cannot take it on.",
        hint="import prepare_fx, convert_fx and convert_to_reference_fx from torchq_compat, all of them.",
    )
