"""Try the float model on its example, and capture it with opaque calls of its custom modules."""

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

__all__ = ["CapturedModel", "TriedModel", "capture_model", "try_model"]


@dataclass(frozen=True)
class TriedModel:
    """A float model and what it makes of the example inputs.

    Attributes:
        runs: of the float model; they keep what the custom modules were called with.
    """

    runs: Runs
    example: FloatRun

    @property
    def problem(self) -> ExampleInputsError | None:
        """Say what is wrong with the example: torch.export accepts some that no kernel does, integers for a
        float linear."""
        if self.example.error is None:
            return None
        return ExampleInputsError.does_not_fit(type(self.runs.model).__name__, self.example.error)


@dataclass(frozen=True)
class CapturedModel:
    """A float model and the graph that was captured of it.

    Attributes:
        case: what was captured, and how to run the float model.
        found: the graph, custom modules as opaque ops, and the sizes it takes.
    """

    case: CaptureCase
    found: Attempt

    @property
    def stubs(self) -> StubRegistry:
        return self.case.runs.stubs


def try_model(
    working: nn.Module, swaps: Sequence[Swap], request: PrepareRequest, *, is_rolled: bool = False
) -> TriedModel:
    """Run a copy of ``working`` on the example inputs.

    Args:
        is_rolled: whether the swaps are of a model whose loops were rolled: the calls are others then.
    """
    runs = Runs(trial_copy(working), StubRegistry(), {swap.paths[0]: swap.module for swap in swaps})
    recorded = [] if request.is_qat or is_rolled else [swap.paths[0] for swap in swaps]
    return TriedModel(runs, runs.of_float_model(request.example_inputs, recorded=recorded))


def capture_model(
    working: nn.Module,
    model: nn.Module,
    tried: TriedModel,
    signature: CallSignature,
    swaps: list[Swap],
    request: PrepareRequest,
) -> CapturedModel:
    """Capture ``working``, in which stubs take the places of the custom modules.

    Args:
        model: what ``working`` is a copy of, for error messages.

    Raises:
        CaptureError: torch.export or the model fails, or every graph computes something else.
        ExampleInputsError: the float model does not take the example inputs.
    """
    args, stubs = request.example_inputs, tried.runs.stubs
    apply_swaps(working, swaps, stubs)
    show_identities(working)
    watching = stubs.results.watch(working)
    inputs = signature.labelled(args)
    labels = list(inputs)
    ones = tuple((labels[argument], dimension) for argument, dimension in request.ones)
    case = CaptureCase(working, args, inputs, request.dynamic_shapes, tried.runs, tried.example, ones=ones)
    try:
        with failed_attempts_held_back():
            found = capture_checked(case)
    except Exception as cause:
        raise explain_failure(model, args, cause) from without_frames_of_torch(cause)
    finally:
        watching.remove()
    if tried.problem is not None:
        raise tried.problem
    return CapturedModel(case, found)
