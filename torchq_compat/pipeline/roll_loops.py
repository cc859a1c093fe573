"""Rolls loops over time that the model writes in Python, before capture, or reports why it did not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from torchq_compat.capture.call_signature import CallSignature
from torchq_compat.capture.checked.trial_runs import FloatRun, Runs, trial_copy
from torchq_compat.capture.loops.roll import LoopedSizes, find_looped_sizes, roll_loops
from torchq_compat.capture.loops.step_flow import NotALoopError
from torchq_compat.custom_modules.swap import apply_swaps, decide_swaps
from torchq_compat.opaque_calls.capture_stub import StubRegistry
from torchq_compat.pipeline.prepare_request import PrepareRequest
from torchq_compat.support.decisions import Action, Decision

__all__ = ["WithLoops", "with_rolled_loops"]


@dataclass(frozen=True)
class WithLoops:
    """A float model whose loops over time are modules if they could be rolled.

    Attributes:
        model: the model to capture; a new one if loops were rolled.
        steps: paths in ``model`` of the submodules that compute one step.
        decisions: the decisions about the loops.
        example: the run of ``model`` on the example inputs, if there was one.
    """

    model: nn.Module
    steps: tuple[str, ...] = ()
    decisions: tuple[Decision, ...] = ()
    example: FloatRun | None = None


def with_rolled_loops(working: nn.Module, signature: CallSignature, request: PrepareRequest) -> WithLoops:
    """Return ``working`` with its loops over time as modules, or as it is if they cannot be rolled."""
    if request.is_step or request.dynamic_shapes is not None:
        return WithLoops(working)
    args = request.example_inputs
    inputs: Mapping[str, Any] = signature.labelled(args)
    runs = Runs(trial_copy(working), StubRegistry(), {})
    looped, example = find_looped_sizes(runs, args, inputs)
    if looped is None:
        return WithLoops(working, example=example)
    if request.unrolled_because:
        return _as_written(working, looped, request.unrolled_because)
    swaps, _ = decide_swaps(
        working, request.rules, request.settings, request.backend, request.untraced_because
    )

    def put_stubs(model: nn.Module, stubs: StubRegistry) -> Mapping[str, nn.Module]:
        apply_swaps(model, swaps, stubs)
        for swap in swaps:
            if swap.paths[0] in looped.repeated:
                swap.handler.give_states(model.get_submodule(swap.paths[0]))
        return {swap.paths[0]: swap.module for swap in swaps}

    try:
        rolled = roll_loops(working, runs, args, inputs, looped, put_stubs, is_trained=request.is_qat)
    except NotALoopError as reason:
        return _as_written(working, looped, str(reason))
    except Exception as cause:
        # A repetition in the graph may have a form that the rolling does not foresee; the unrolled model can
        # still be captured.
        return _as_written(working, looped, f"{type(cause).__name__}: {cause}")
    return WithLoops(rolled.model, tuple(f"{path}.step" for path in rolled.loops))


def _as_written(working: nn.Module, looped: LoopedSizes, reason: str) -> WithLoops:
    where = ", ".join(f"{label}.size({index})" for group in looped.groups for label, index in group[:1])
    first_line = (reason.strip().splitlines() or [""])[0]
    told = f"the loop over {where} is written out for the length of the example: {first_line}"
    return WithLoops(working, decisions=(Decision("", "loop over time", Action.FIXED, told),))
