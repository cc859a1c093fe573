"""Prepare: turns a float model and the arguments of ``prepare_fx`` into an observed model, stage by stage."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from torchq_compat import batch_norm
from torchq_compat.capture.call_signature import CallSignature
from torchq_compat.capture.checked.checked_prepare import check_prepared, trial_runs
from torchq_compat.capture.checked.infinite_values import mark_infinite_values
from torchq_compat.capture.checked.size_decisions import decide_blocks, decide_sizes
from torchq_compat.capture.example_inputs import is_one_value_a_channel, with_two_samples
from torchq_compat.capture.leftovers import decide_leftovers
from torchq_compat.capture.parametrizations import compute_weights, decide_parametrizations
from torchq_compat.capture.purposeful_training import (
    EvaluationRun,
    decide_evaluation,
    fix_modes,
    run_in_evaluation,
)
from torchq_compat.capture.source_functions import restore_source_functions
from torchq_compat.capture.torch_export import copied_inputs
from torchq_compat.capture.training_flags import decide_training_flags, set_training_flags
from torchq_compat.capture.unmatched_rules import decide_unmatched_rules, decide_unmatched_settings
from torchq_compat.custom_modules.root import with_parent
from torchq_compat.custom_modules.swap import decide_swaps, is_untraced_in_fx
from torchq_compat.errors import CaptureError, TorchQCompatError
from torchq_compat.graph.graph_module import ModelRecord, QuantizationGraphModule, Stage
from torchq_compat.graph.module_views import ModuleFacts, describe_modules
from torchq_compat.graph.observed_graph import calibrate_with_float_weights
from torchq_compat.graph.quantized_interface import QuantizedInterface
from torchq_compat.graph.replaced_observers import observed_places
from torchq_compat.pipeline.capture_model import CapturedModel, capture_model, try_model
from torchq_compat.pipeline.float_model import check_float_model, signature_of
from torchq_compat.pipeline.insert_observers import Captured, observe_by_quantizer, observe_by_rules
from torchq_compat.pipeline.observe_modules import (
    boundaries_of,
    loses_forward,
    maps_to_users_class,
    observe_modules,
    place_modules,
)
from torchq_compat.pipeline.prepare_request import PrepareRequest
from torchq_compat.pipeline.roll_loops import WithLoops, with_rolled_loops
from torchq_compat.pipeline.share_modules import share_modules
from torchq_compat.support.decisions import Action, Decision
from torchq_compat.support.model_copies import copied_model
from torchq_compat.support.progress import slow_stage
from torchq_compat.support.user_warnings import warn_user

__all__ = ["prepare"]

#: How many places a warning names, the first ones.
NAMED_PLACES = 3
UNTRACED = "one float call, as in FX, because traced it fails"


def prepare(model: nn.Module, request: PrepareRequest) -> QuantizationGraphModule:
    """Return an observed copy of ``model``, which stays as it is.

    Raises:
        TorchQCompatError: see the entry points in ``quantize_fx``.
    """
    check_float_model(model)
    # torchao's prepare for QAT makes random example inputs of its own.
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        return _first_that_succeeds(model, request)


def _first_that_succeeds(model: nn.Module, request: PrepareRequest) -> QuantizationGraphModule:
    """Return ``model`` prepared in the first way that succeeds; raise the first error if none does."""
    waiting, first = [request], None
    while waiting:
        tried = waiting.pop(0)
        try:
            return _prepare(model, tried)
        except _RolledModelFailedError as failed:
            waiting.insert(0, replace(tried, unrolled_because=str(failed)))
        except TorchQCompatError as error:
            first = first or error
            if isinstance(error, CaptureError):
                waiting.extend(_other_ways(model, tried, error))
    assert first is not None
    raise first from first.__cause__


def _other_ways(model: nn.Module, tried: PrepareRequest, error: CaptureError) -> Iterator[PrepareRequest]:
    """Yield what to try after ``tried`` failed with ``error``."""
    if is_one_value_a_channel(error.__cause__) and tried.dynamic_shapes is None and not tried.has_two_samples:
        # FX runs nothing in prepare: scripts may give it one sample, and train with larger batches.
        yield replace(tried, example_inputs=with_two_samples(tried.example_inputs), has_two_samples=True)
    has_untraced = any(is_untraced_in_fx(module, tried.backend) for module in model.modules())
    if has_untraced and not tried.untraced_because:
        yield replace(tried, untraced_because=f"{UNTRACED}: {error.message.splitlines()[0]}")


class _RolledModelFailedError(Exception):
    """Preparing a model with rolled loops failed; preparing it as it was written may succeed."""


def _prepare(model: nn.Module, request: PrepareRequest) -> QuantizationGraphModule:
    name, is_qat = type(model).__name__, request.is_qat

    # Copy.
    working = with_parent(copied_model(model), request.settings)
    set_training_flags(working, is_qat=is_qat)
    if not is_qat and request.quantizer is None:
        compute_weights(working, request.rules)
    cumulative = batch_norm.before_capture(working)
    signature = signature_of(working, request.example_inputs)

    modules_of = describe_modules(working)
    with slow_stage(f"looking for loops in {name}"):
        with_loops = with_rolled_loops(working, signature, request)
    copied = _Copied(working, with_loops, signature, modules_of, cumulative)
    if not with_loops.steps:
        return _prepare_copied(model, copied, request)
    try:
        return _prepare_copied(model, copied, request)
    except Exception as cause:
        first_line = (str(cause).strip().splitlines() or [""])[0]
        raise _RolledModelFailedError(f"{type(cause).__name__}: {first_line}") from cause


@dataclass(frozen=True)
class _Copied:
    """A copy of the float model.

    Attributes:
        as_written: the copy whose loops are run by the model's own code.
        with_loops: the copy whose loops are modules.
    """

    as_written: nn.Module
    with_loops: WithLoops
    signature: CallSignature
    modules: Mapping[str, ModuleFacts]
    cumulative: Collection[str]


def _prepare_copied(model: nn.Module, copied: _Copied, request: PrepareRequest) -> QuantizationGraphModule:
    name, is_qat = type(model).__name__, request.is_qat
    as_written, with_loops, signature = copied.as_written, copied.with_loops, copied.signature
    working = with_loops.model

    # Select the custom modules, and report what is left behind.
    swaps, decisions = decide_swaps(
        working, request.rules, request.settings, request.backend, request.untraced_because
    )
    leftovers = () if request.is_step else _decide_leftovers(model, as_written, request)

    # Try, and capture what was tried.
    in_evaluation = run_in_evaluation(as_written, request.example_inputs) if is_qat else EvaluationRun()
    with slow_stage(f"capturing {name}"):
        tried = try_model(as_written, swaps, request, with_loops)
        captured = capture_model(working, model, tried, signature, swaps, request)
    graph_module = captured.found.graph_module
    mark_infinite_values(graph_module, captured.case)
    fix_modes(graph_module, working, in_evaluation, is_qat=is_qat)

    # Observe the custom modules, and place them.
    modules = observe_modules(captured, swaps, lambda inner: prepare(inner.module, request.inside(inner)))
    restore_source_functions(graph_module, working)
    writers, decisions = share_modules(captured, swaps, modules, decisions, request.quantizer)
    decisions.extend(place_modules(captured, swaps, modules, writers, is_qat=is_qat))
    boundaries = boundaries_of(graph_module, swaps, tried.runs.calls)

    # Annotate, and insert observers.
    interface = _read_interface(captured, request)
    batch_norms = batch_norm.by_path(graph_module)
    with slow_stage(f"observing {name}"):
        prepared, decided = _insert_observers(
            Captured(graph_module, working, boundaries, interface, copied.cumulative, batch_norms), request
        )

    # Wrap, and check.
    named = {decision.path for decision in decisions}
    decisions.extend(decision for decision in decided if decision.path not in named)
    decisions.extend(decide_evaluation(model, in_evaluation))
    decisions.extend(decide_blocks(captured.found, is_qat=is_qat))
    decisions.extend(decide_sizes(captured.case, captured.found))
    decisions.extend(with_loops.decisions)
    record = ModelRecord(
        Stage.PREPARED,
        signature.with_sizes(captured.found.sizes),
        (*leftovers, *decisions),
        is_qat,
        request.rules if request.quantizer is None else None,
        interface,
        request.backend if request.quantizer is None else None,
        is_custom_module=type(as_written) is not type(model),
        modules=copied.modules,
        batch_norms=batch_norms,
        steps=with_loops.steps,
        observed=tuple(observed_places(prepared)),
        trial_inputs=copied_inputs(trial_runs(captured.case, captured.found)[0].args),
    )
    made = QuantizationGraphModule.wrap(prepared, record, _preserved(as_written, request))
    with slow_stage(f"checking {name}"):
        users_own = tuple(swap.paths[0] for swap in swaps if maps_to_users_class(swap))
        lost = tuple(swap.paths[0] for swap in swaps if loses_forward(swap))
        differing = check_prepared(made, captured.case, captured.found, users_own, lost)
    made.add_decisions(differing)
    _warn(made.record.decisions)
    return made


def _decide_leftovers(model: nn.Module, working: nn.Module, request: PrepareRequest) -> tuple[Decision, ...]:
    """Return the decisions about flags, attributes, hooks and rules, which are not modules of the graph."""
    return (
        *decide_training_flags(model, is_qat=request.is_qat),
        *decide_leftovers(working, request.settings.preserved_attributes),
        *decide_unmatched_settings(working, request.settings),
        *(_about_rules(model, working, request) if request.quantizer is None else ()),
    )


def _about_rules(model: nn.Module, working: nn.Module, request: PrepareRequest) -> tuple[Decision, ...]:
    return (
        *decide_unmatched_rules(working, request.rules),
        *decide_parametrizations(model, request.rules, is_qat=request.is_qat),
    )


def _read_interface(captured: CapturedModel, request: PrepareRequest) -> QuantizedInterface:
    settings = request.settings
    return QuantizedInterface.read(
        settings.input_quantized_indexes,
        settings.output_quantized_indexes,
        request.example_inputs,
        captured.found.graph_module,
        whole_result=captured.stubs.results.returns_whole_result,
    )


def _insert_observers(
    captured: Captured, request: PrepareRequest
) -> tuple[GraphModule, tuple[Decision, ...]]:
    is_qat = request.is_qat
    if request.quantizer is not None:
        prepared, decided = observe_by_quantizer(captured, request.quantizer, is_qat=is_qat)
    else:
        prepared, decided = observe_by_rules(captured, request.rules, request.backend, is_qat=is_qat)
    if not is_qat:
        calibrate_with_float_weights(prepared)
    return prepared, decided


def _preserved(working: nn.Module, request: PrepareRequest) -> dict[str, Any]:
    names = request.settings.preserved_attributes
    return {name: getattr(working, name) for name in names if hasattr(working, name)}


def _warn(decisions: tuple[Decision, ...]) -> None:
    """Warn about decisions that could mislead the user, once for all places with the same reason."""
    alike: dict[tuple[Action, str], list[Decision]] = {}
    for decision in decisions:
        if decision.warn:
            alike.setdefault((decision.action, decision.reason), []).append(decision)
    for (action, reason), found in alike.items():
        is_one = len(found) == 1
        if action is Action.FLOAT:
            outcome = "stays float" if is_one else "stay float"
        else:
            outcome = f"{'is' if is_one else 'are'} {action.value}"
        warn_user(f"{_places(found)} {outcome}: {reason}")


def _places(decisions: list[Decision]) -> str:
    paths: dict[str, list[str]] = {}
    for decision in decisions[:NAMED_PLACES]:
        paths.setdefault(decision.kind, []).append(repr(decision.path))
    named = ", ".join(f"{kind} at {', '.join(of_kind)}" for kind, of_kind in paths.items())
    more = len(decisions) - NAMED_PLACES
    return f"{named} and {more} more" if more > 0 else named
