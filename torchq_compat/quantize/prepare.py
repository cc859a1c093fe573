"""Prepare: turns a float model and the arguments of ``prepare_fx`` into an observed model, stage by stage."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.quantizer import Quantizer

from torchq_compat.annotate import batch_norm
from torchq_compat.annotate.annotation import NodeSpecs, write_op_records
from torchq_compat.annotate.decide import decide_graph
from torchq_compat.annotate.observed_graph import (
    calibrate_with_float_weights,
    observed_places,
    prepare_graph,
    prepare_with,
)
from torchq_compat.annotate.quantizers import UserQuantizer
from torchq_compat.annotate.unmatched import decide_unmatched_rules, decide_unmatched_settings
from torchq_compat.capture.checked import (
    check_prepared,
    decide_blocks,
    decide_sizes,
    mark_infinite_values,
    trial_runs,
)
from torchq_compat.capture.example_inputs import is_one_value_a_channel, with_two_samples
from torchq_compat.capture.opaque_calls import OpaqueBoundary
from torchq_compat.capture.origins import decide_leftovers
from torchq_compat.capture.signature import CallSignature
from torchq_compat.capture.torch_export import copied_inputs, restore_source_functions
from torchq_compat.capture.training import (
    EvaluationRun,
    decide_evaluation,
    decide_training_flags,
    fix_modes,
    run_in_evaluation,
    set_training_flags,
)
from torchq_compat.capture.unseen_python import compute_weights, decide_parametrizations
from torchq_compat.errors import CaptureError, TorchQCompatError
from torchq_compat.model.graph_module import ModelRecord, QuantizationGraphModule, Stage
from torchq_compat.model.quantized_interface import QuantizedInterface
from torchq_compat.model.views import ModuleFacts, describe_modules
from torchq_compat.modules.registry import with_parent
from torchq_compat.modules.swap import decide_swaps, is_untraced_in_fx
from torchq_compat.ops import batch_norms_by_path
from torchq_compat.quantize.capture_model import (
    CapturedModel,
    boundaries_of,
    capture_model,
    loses_forward,
    maps_to_users_class,
    observe_modules,
    place_modules,
    share_modules,
    try_model,
)
from torchq_compat.quantize.request import (
    PrepareRequest,
    WithLoops,
    check_float_model,
    signature_of,
    with_rolled_loops,
)
from torchq_compat.read.backend_configs import BackendTable
from torchq_compat.read.qconfig_mappings import QConfigRules
from torchq_compat.support.decisions import Action, Decision
from torchq_compat.support.graph_nodes import copied_model
from torchq_compat.support.text_table import slow_stage
from torchq_compat.support.user_warnings import warn_user

# Inserts observers into a captured model, where FX's configuration or a user's Quantizer puts them.


Observed = tuple[GraphModule, tuple[Decision, ...]]


@dataclass(frozen=True)
class Captured:
    """A captured model.

    Attributes:
        graph_module: the captured graph, with custom modules as opaque calls.
        model: the exported module.
        boundaries: the specs around each opaque call.
        interface: which inputs and outputs are integers.
        cumulative: what ``batch_norm.before_capture`` returned.
        batch_norms: path of every batch norm -> label of the op it follows.
    """

    graph_module: GraphModule
    model: nn.Module
    boundaries: Mapping[Node, OpaqueBoundary]
    interface: QuantizedInterface
    cumulative: Collection[str] = ()
    batch_norms: Mapping[str, str] = field(default_factory=dict)


def observe_by_rules(
    captured: Captured, rules: QConfigRules, backend: BackendTable, *, is_qat: bool
) -> Observed:
    """Annotate and prepare the graph by a QConfigMapping and a BackendConfig; return the decisions too."""
    decisions: list[Decision] = []

    def decide(graph_module: GraphModule) -> dict[Node, NodeSpecs]:
        decided = decide_graph(
            graph_module,
            captured.model,
            rules,
            backend,
            captured.boundaries,
            captured.interface.input_nodes(graph_module),
            captured.interface.output_edges(graph_module),
            frozenset(captured.batch_norms.values()),
        )
        decisions.extend(decided.decisions)
        write_op_records(decided.records)
        return decided.specs

    prepared = prepare_graph(captured.graph_module, decide, is_qat=is_qat, cumulative=captured.cumulative)
    return prepared, tuple(decisions)


def observe_by_quantizer(captured: Captured, quantizer: Quantizer, *, is_qat: bool) -> Observed:
    """Annotate everything but custom modules by ``quantizer``, and prepare; return the decisions too."""
    around = UserQuantizer(quantizer, captured.boundaries, captured.model)
    prepared = prepare_with(captured.graph_module, around, is_qat=is_qat, cumulative=captured.cumulative)
    return prepared, around.decisions(prepared)


# Prepare: turns a float model and the arguments of ``prepare_fx`` into an observed model, stage by stage.


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
    batch_norms = batch_norms_by_path(graph_module)
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
