"""Runs the float model on its example inputs, and captures it with its custom modules as opaque calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from torchq_compat.capture.call_signature import CallSignature
from torchq_compat.capture.checked.attempts import Attempt, CaptureCase
from torchq_compat.capture.checked.checked_capture import capture_checked
from torchq_compat.capture.checked.trial_runs import FloatRun, Runs, trial_copy
from torchq_compat.capture.identities import show_identities
from torchq_compat.capture.short_tracebacks import failed_attempts_held_back, without_frames_of_torch
from torchq_compat.capture.torch_export import explain_failure
from torchq_compat.custom_modules.swap import Swap, apply_swaps
from torchq_compat.errors import ExampleInputsError
from torchq_compat.opaque_calls.capture_stub import StubRegistry
from torchq_compat.pipeline.prepare_request import PrepareRequest
from torchq_compat.pipeline.roll_loops import WithLoops

__all__ = ["CapturedModel", "TriedModel", "capture_model", "try_model"]


@dataclass(frozen=True)
class TriedModel:
    """A float model and its run on the example inputs.

    Attributes:
        runs: runs the float model, and keeps the arguments of its custom modules.
        example: the run on the example inputs.
    """

    runs: Runs
    example: FloatRun

    @property
    def problem(self) -> ExampleInputsError | None:
        """The error for example inputs that the float model fails on, or None. torch.export accepts some that
        no kernel does, such as integers for a float linear."""
        if self.example.error is None:
            return None
        return ExampleInputsError.does_not_fit(type(self.runs.model).__name__, self.example.error)


@dataclass(frozen=True)
class CapturedModel:
    """A float model and its captured graph.

    Attributes:
        case: the model that was captured, its inputs, and the runs of the float model.
        found: the graph, with custom modules as opaque ops, and the sizes it accepts.
    """

    case: CaptureCase
    found: Attempt

    @property
    def stubs(self) -> StubRegistry:
        return self.case.runs.stubs


def try_model(
    working: nn.Module, swaps: Sequence[Swap], request: PrepareRequest, with_loops: WithLoops
) -> TriedModel:
    """Run a copy of ``working`` on the example inputs, or take the run that there was.

    Args:
        with_loops: the model of ``swaps``; if it has rolled loops, its calls differ from those of
            ``working``.
    """
    runs = Runs(trial_copy(working), StubRegistry(), {swap.paths[0]: swap.module for swap in swaps})
    recorded = [] if request.is_qat or with_loops.steps else [swap.paths[0] for swap in swaps]
    example = with_loops.example
    # Hooks, which counted the calls of modules, break the loops of torch's own operators.
    if not recorded and example is not None and example.error is None:
        return TriedModel(runs, example)
    return TriedModel(runs, runs.of_float_model(request.example_inputs, recorded=recorded))


def capture_model(
    working: nn.Module,
    model: nn.Module,
    tried: TriedModel,
    signature: CallSignature,
    swaps: list[Swap],
    request: PrepareRequest,
) -> CapturedModel:
    """Replace the custom modules of ``working`` by stubs, and capture it.

    Args:
        model: the model that ``working`` is a copy of, for error messages.

    Raises:
        CaptureError: torch.export or the model fails, or no captured graph computes what the model does.
        ExampleInputsError: the float model does not accept the example inputs.
    """
    args, stubs = request.example_inputs, tried.runs.stubs
    apply_swaps(working, swaps, stubs)
    show_identities(working)
    watching = stubs.results.watch(working)
    inputs = signature.labelled(args)
    case = CaptureCase(working, args, inputs, request.dynamic_shapes, tried.runs, tried.example)
    try:
        with failed_attempts_held_back():
            case, found = capture_checked(case)
    except Exception as cause:
        raise explain_failure(model, args, cause) from without_frames_of_torch(cause)
    finally:
        watching.remove()
    if tried.problem is not None:
        raise tried.problem
    return CapturedModel(case, found)
