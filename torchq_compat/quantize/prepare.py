"""Prepare: turns a float model and the arguments of ``prepare_fx`` into an observed model, stage by stage."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.quantizer import Quantizer

from torchq_compat.annotate import batch_norm, extreme_values, observed_graph
from torchq_compat.annotate.annotation import NodeSpecs, SpecQuantizer, write_op_records
from torchq_compat.annotate.decide import decide_graph
from torchq_compat.annotate.patterns import is_folded_in_fx
from torchq_compat.annotate.quantizers import QuantizerFailedError, UserQuantizer
from torchq_compat.annotate.unmatched import RULE, decide_unmatched_rules, decide_unmatched_settings
from torchq_compat.capture import checked, training
from torchq_compat.capture.opaque_calls import OpaqueBoundary
from torchq_compat.capture.origins import find_origin
from torchq_compat.capture.torch_export import NO_SIZE, copied_inputs, restore_source_functions
from torchq_compat.codes import error_line, said
from torchq_compat.errors import CaptureError, TorchQCompatError
from torchq_compat.model.graph_module import LAST_CALL, ModelRecord, QuantizationGraphModule, Stage
from torchq_compat.model.quantized_interface import QuantizedInterface, return_structure
from torchq_compat.model.signature import CallSignature
from torchq_compat.model.views import ModuleFacts, describe_modules
from torchq_compat.modules.registry import with_parent
from torchq_compat.modules.swap import Swap, decide_swaps, is_untraced_in_fx
from torchq_compat.ops import batch_norms_by_path, those
from torchq_compat.quantize import capture_model as captures
from torchq_compat.quantize import float_model
from torchq_compat.quantize.passes import PREPARE, carries_out, run_passes
from torchq_compat.quantize.request import (
    PrepareRequest,
    WithLoops,
    check_float_model,
    signature_of,
    with_rolled_loops,
)
from torchq_compat.read.example_inputs import is_one_value_a_channel, take_by_position, with_two_samples
from torchq_compat.support import graph_nodes
from torchq_compat.support.decisions import (
    Action,
    Decision,
    warn_of_decisions,
    warned_if_nothing_is_quantized,
)
from torchq_compat.support.process_state import draws_kept
from torchq_compat.support.upstream import pytree

# Inserts observers into a captured model, where FX's configuration or a user's Quantizer puts them.


Observed = tuple[GraphModule, tuple[Decision, ...]]


def _observe_by_rules(state: _Preparing) -> Observed:
    """Annotate and prepare the graph by a QConfigMapping and a BackendConfig; return the decisions too."""
    decisions: list[Decision] = []
    request, model = state.request, state.with_loops.model

    def may_fold(op: Node, norm: Node) -> bool:
        if is_folded_in_fx(op, norm, model, request.backend):
            return True
        # FX fuses it with the ReLU instead, and is nearer to float: the weight has one scale for all.
        if op.target in those("transposed") and any(user.target in those("relu") for user in norm.users):
            return False
        if not request.fuse_as_fx and not state.is_qat:
            path, kind = graph_nodes.module_path_of(norm), find_origin(norm, model).module_type.__name__
            reason = f"it is in the weight of {graph_nodes.module_path_of(op)}"
            unlike = said("TQ584")
            decisions.append(Decision(path, kind, Action.FOLDED, reason, unlike_fx=unlike, code="TQ584"))
        return not request.fuse_as_fx

    def decide(graph_module: GraphModule) -> dict[Node, NodeSpecs]:
        decided = decide_graph(
            graph_module,
            model,
            request.rules,
            request.backend,
            state.boundaries,
            state.interface.input_nodes(graph_module),
            state.interface.output_edges(graph_module),
            frozenset(state.batch_norms.values()),
        )
        decisions.extend(decided.decisions)
        write_op_records(decided.records)
        return decided.specs

    prepared = observed_graph.prepare_graph(
        state.captured.attempt.graph_module,
        SpecQuantizer(decide),
        is_qat=state.is_qat,
        cumulative=state.cumulative,
        may_fold=may_fold,
    )
    return prepared, tuple(decisions)


def _observe_by_quantizer(state: _Preparing, quantizer: Quantizer) -> Observed:
    """Annotate everything but custom modules by ``quantizer``, and prepare; return the decisions too."""
    is_fixed = bool(state.request.fixed_because)
    around = UserQuantizer(quantizer, state.boundaries, state.with_loops.model, is_fixed=is_fixed)
    graph_module = state.captured.attempt.graph_module
    prepared = observed_graph.prepare_graph(
        graph_module, around, is_qat=state.is_qat, cumulative=state.cumulative
    )
    return prepared, around.decisions(prepared)


# Prepare: turns a float model and the arguments of ``prepare_fx`` into an observed model, stage by stage.


UNTRACED = "one float call, as in FX, because traced it fails"


def prepare(model: nn.Module, request: PrepareRequest) -> QuantizationGraphModule:
    """Return an observed copy of ``model``, which stays as it is.

    Raises:
        TorchQCompatError: see the entry points in ``quantize_fx``.
    """
    check_float_model(model)
    # torchao's prepare for QAT makes random example inputs of its own.
    with draws_kept():
        return _first_that_succeeds(model, request)


def _first_that_succeeds(model: nn.Module, request: PrepareRequest) -> QuantizationGraphModule:
    """Return ``model`` prepared in the first way that succeeds; raise the first error if none does."""
    waiting: list[PrepareRequest] = [request]
    first: Exception | None = None
    while waiting:
        tried = waiting.pop(0)
        try:
            return _prepare(model, tried)
        except _RolledModelFailedError as failed:
            waiting.insert(0, replace(tried, unrolled_because=str(failed)))
        except QuantizerFailedError as failed:
            first = first or failed.raised
            if not tried.fixed_because:
                waiting.append(_with_fixed_sizes(tried, failed.raised))
        except TorchQCompatError as error:
            first = first or error
            if isinstance(error, CaptureError):
                waiting.extend(_other_ways(model, tried, error))
    assert first is not None
    raise first from first.__cause__


def _with_fixed_sizes(tried: PrepareRequest, cause: Exception) -> PrepareRequest:
    """Return ``tried`` with the sizes of the example: its Quantizer fails, or writes them into the graph."""
    because = said("TQ329", quantizer=tried.quantizer, error=cause)
    return replace(tried, dynamic_shapes=NO_SIZE, fixed_because=because)


def _other_ways(model: nn.Module, tried: PrepareRequest, error: CaptureError) -> Iterator[PrepareRequest]:
    """Yield what to try after ``tried`` failed with ``error``."""
    if is_one_value_a_channel(error.__cause__) and tried.dynamic_shapes is None and not tried.has_two_samples:
        # FX runs nothing in prepare: scripts may give it one sample, and train with larger batches.
        yield replace(tried, example_inputs=with_two_samples(tried.example_inputs), has_two_samples=True)
    has_untraced = any(is_untraced_in_fx(module, tried.backend) for module in model.modules())
    if has_untraced and not tried.untraced_because:
        yield replace(tried, untraced_because=f"{UNTRACED}: {error.message.splitlines()[0]}")
    if tried.quantizer is not None and not tried.fixed_because:
        yield _with_fixed_sizes(tried, error)


class _RolledModelFailedError(Exception):
    """Preparing a model with rolled loops failed; preparing it as it was written may succeed."""


class _Preparing:
    """What the passes of prepare hand on; see ``PREPARE``.

    Attributes:
        shared: the tensors of the model that share their memory with the copy, each with its copy.
        working: the copy whose loops are run by the model's own code.
        with_loops: the copy whose loops are modules.
    """

    shared: Sequence[tuple[Tensor, Tensor]] = ()
    working: nn.Module
    signature: CallSignature
    modules: Mapping[str, ModuleFacts]
    cumulative: Collection[str]
    with_loops: WithLoops
    swaps: list[Swap]
    decisions: list[Decision]
    leftovers: tuple[Decision, ...]
    in_evaluation: training.EvaluationRun
    tried: captures.TriedModel
    captured: captures.CapturedModel
    boundaries: Mapping[Node, OpaqueBoundary]
    interface: QuantizedInterface
    batch_norms: Mapping[str, str]
    observed: GraphModule
    prepared: QuantizationGraphModule

    def __init__(self, model: nn.Module, request: PrepareRequest) -> None:
        self.model = model
        self.request = request
        self.is_qat = request.is_qat


def _prepare(model: nn.Module, request: PrepareRequest) -> QuantizationGraphModule:
    state = _Preparing(model, request)
    try:
        run_passes(PREPARE, state, model)
    except Exception as cause:
        is_raised = isinstance(cause, Warning)  # By a filter of the user.
        if is_raised or not hasattr(state, "with_loops") or not state.with_loops.steps:
            raise
        raise _RolledModelFailedError(error_line(cause)) from cause
    finally:
        graph_nodes.stop_sharing_written(state.shared)
        graph_nodes.give_back_freed()
    return state.prepared


@carries_out(PREPARE, "copy the model")
def _copy(state: _Preparing) -> None:
    request = state.request
    copied = graph_nodes.copied_model(state.model)
    state.shared = graph_nodes.shared_tensors(state.model, copied)
    take_by_position(copied)
    state.working = working = with_parent(copied, request.settings)
    float_model.set_training_flags(working, is_qat=state.is_qat)
    if not state.is_qat and request.quantizer is None:
        float_model.compute_weights(working, request.rules)
    state.cumulative = batch_norm.before_capture(working)
    state.signature = signature_of(working, request.example_inputs)
    state.modules = describe_modules(working)


@carries_out(PREPARE, "roll loops")
def _roll_loops(state: _Preparing) -> None:
    state.with_loops = with_rolled_loops(state.working, state.signature, state.request)


@carries_out(PREPARE, "select custom modules")
def _select(state: _Preparing) -> None:
    request = state.request
    state.swaps, state.decisions = decide_swaps(
        state.with_loops.model, request.rules, request.settings, request.backend, request.untraced_because
    )
    state.leftovers = () if request.is_step else _decide_leftovers(state.model, state.working, request)


@carries_out(PREPARE, "capture")
def _capture(state: _Preparing) -> None:
    request, working = state.request, state.with_loops.model
    state.in_evaluation = (
        training.run_in_evaluation(state.working, request.example_inputs)
        if state.is_qat
        else training.EvaluationRun()
    )
    state.tried = captures.try_model(state.working, state.swaps, request, state.with_loops)
    state.captured = captures.capture_model(
        working, state.model, state.tried, state.signature, state.swaps, request
    )
    graph_module = state.captured.attempt.graph_module
    extreme_values.mark_infinite_values(graph_module, state.captured.case, request.first_inputs)
    training.fix_modes(graph_module, working, state.in_evaluation, is_qat=state.is_qat)


@carries_out(PREPARE, "observe custom modules")
def _observe_modules(state: _Preparing) -> None:
    request, captured, swaps = state.request, state.captured, state.swaps
    graph_module = captured.attempt.graph_module
    modules = captures.observe_modules(
        captured, swaps, lambda inner: prepare(inner.module, request.inside(inner))
    )
    restore_source_functions(graph_module, state.with_loops.model)
    writers, state.decisions = captures.share_modules(
        captured,
        swaps,
        modules,
        state.decisions,
        request.quantizer,
        is_fixed=bool(request.fixed_because),
    )
    state.decisions.extend(captures.place_modules(captured, swaps, modules, writers, is_qat=state.is_qat))
    state.boundaries = captures.boundaries_of(graph_module, swaps, state.tried.calls)


@carries_out(PREPARE, "insert observers")
def _observe(state: _Preparing) -> None:
    graph_module = state.captured.attempt.graph_module
    growing = extreme_values.growing_values(
        state.captured.case, state.captured.attempt, state.request.longer_inputs
    )
    producers = {node.name: [item.name for item in node.all_input_nodes] for node in graph_module.graph.nodes}
    request, settings = state.request, state.request.settings
    state.interface = QuantizedInterface.read(
        settings.input_quantized_indexes,
        settings.output_quantized_indexes,
        request.example_inputs,
        graph_module,
        whole_result=state.captured.stubs.returns_whole_result,
    )
    state.batch_norms = batch_norms_by_path(graph_module)
    if request.quantizer is None:
        state.observed, decided = _observe_by_rules(state)
    else:
        state.observed, decided = _observe_by_quantizer(state, request.quantizer)
    if not state.is_qat:
        observed_graph.calibrate_with_float_weights(state.observed)
    named = {decision.path for decision in state.decisions}
    quantized = {item.node for item in decided if item.action in (Action.QUANTIZED, Action.SHARED)}
    is_told = request.is_step and not state.is_qat
    thresholds = _thresholds(graph_module, quantized, request.states) if is_told else ()
    for item in decided:
        # An op quantizes what it reads, too; what shares the observer of an op was told there.
        read = producers.get(item.node, [])
        known = next((growing[name] for name in (item.node, *read) if name in growing), None)
        is_behind = item.action is Action.SHARED and not quantized.isdisjoint(read)
        if known is not None and item.node in quantized and not is_behind:
            why = said("TQ437", size=known[0], factor=known[1])
            item = replace(item, reason=f"{item.reason}; {why}", warn=True, code="TQ437")
        elif item.path.rpartition("/")[2] in thresholds:
            item = replace(item, reason=f"{item.reason}; {said('TQ442')}", warn=True, code="TQ442")
        if item.path not in named:
            state.decisions.append(item)


def _thresholds(step: GraphModule, quantized: Collection[str], states: int) -> set[str]:
    """Return the ops in the step of a loop that jump where what is ``quantized`` is off by one integer, and
    whose results the loop computes with."""
    graph = step.graph
    results = pytree.tree_leaves(graph.output_node().args)
    # A state is what the step before it returned.
    before = dict(zip(graph.find_nodes(op="placeholder")[:states], results, strict=False))
    behind, result = set[Node](), set[str]()
    for _ in range(2):
        for node in graph.nodes:
            reads = [before[node]] if node in before else node.all_input_nodes
            if not behind.isdisjoint(reads) or node.name in quantized:
                behind.add(node)
    for node in behind:
        # A choice between values, as in a piecewise function, is mostly of equal ones at the threshold.
        chosen = those("picks", "check") if node.target in those("compares") else ()
        is_read = any(user.op != "output" and user.target not in chosen for user in node.users)
        if is_read and node.target in those("jumps", "compares", "positions"):
            result.add(node.name)
    return result


@carries_out(PREPARE, "wrap")
def _wrap(state: _Preparing) -> None:
    request, captured = state.request, state.captured
    if state.is_qat and not request.is_step:
        state.decisions[:0] = float_model.decide_training_flags(state.model, is_qat=True, fused=_fused(state))
    state.decisions.extend(training.decide_evaluation(state.model, state.in_evaluation))
    state.decisions.extend(checked.decide_blocks(captured.attempt, is_qat=state.is_qat))
    if not request.is_step:  # The user never passes its inputs.
        state.decisions.extend(checked.decide_sizes(captured.case, captured.attempt))
    state.decisions.extend(state.with_loops.decisions)
    if request.fixed_because and not request.is_step:
        state.decisions.append(
            Decision("", "sizes of inputs", Action.FIXED, request.fixed_because, warn=True, code="TQ329")
        )
    in_steps = _decided_in_steps(state)
    unused = [{item.path for item in decided} for decided in in_steps]
    decided = tuple(
        item
        for item in (*state.leftovers, *state.decisions)
        if item.kind != RULE or item in state.leftovers or all(item.path in paths for paths in unused)
    )
    record = ModelRecord(
        Stage.PREPARED,
        state.signature.with_sizes(captured.attempt.sizes),
        decided,
        state.is_qat,
        request.rules if request.quantizer is None else None,
        state.interface,
        request.backend if request.quantizer is None else None,
        is_custom_module=type(state.working) is not type(state.model),
        modules=state.modules,
        batch_norms=state.batch_norms,
        steps=state.with_loops.steps,
        observed=tuple(observed_graph.observed_places(state.observed)),
        trial_inputs=copied_inputs(checked.short_run(captured.case, captured.attempt).args),
    )
    names = request.settings.preserved_attributes
    preserved = {name: getattr(state.working, name) for name in names if hasattr(state.working, name)}
    if not state.request.is_step:
        return_structure(state.observed.graph)
    state.prepared = QuantizationGraphModule.wrap(state.observed, record, preserved)


@carries_out(PREPARE, "check")
def _check(state: _Preparing) -> None:
    users_own = tuple(swap.paths[0] for swap in state.swaps if captures.maps_to_users_class(swap))
    lost = tuple(swap.paths[0] for swap in state.swaps if captures.loses_forward(swap))
    differing = checked.check_prepared(
        state.prepared,
        state.captured.case,
        state.captured.attempt,
        users_own,
        lost,
        is_rewritten=state.is_qat or state.request.quantizer is not None,
    )
    state.prepared.add_decisions(differing)
    vars(state.prepared).pop(LAST_CALL, None)  # a trial, and no calibration
    if state.is_qat:
        float_model.keep_training_flags(state.prepared, state.model, _fused(state))
        float_model.remember_parameters(state.prepared, state.model)
    if not state.request.is_step:
        inside = [item for decided in _decided_in_steps(state) for item in decided if item.kind != RULE]
        decisions = [*state.prepared.record.decisions, *inside]
        warn_of_decisions(warned_if_nothing_is_quantized(decisions))


def _decided_in_steps(state: _Preparing) -> list[tuple[Decision, ...]]:
    """Return the decisions about the step of each loop."""
    steps = map(state.observed.get_submodule, state.with_loops.steps)
    return [step.record.decisions for step in steps if isinstance(step, QuantizationGraphModule)]


def _fused(state: _Preparing) -> set[str]:
    """Return the paths of the batch norms behind a quantized op, which FX makes one module with it."""
    quantized = {decision.path for decision in state.decisions if decision.action is Action.QUANTIZED}
    return {norm for norm, source in state.batch_norms.items() if source in quantized}


def _decide_leftovers(model: nn.Module, working: nn.Module, request: PrepareRequest) -> tuple[Decision, ...]:
    """Return the decisions about flags, attributes, hooks and rules, which are not modules of the graph."""
    decisions = [] if request.is_qat else [*float_model.decide_training_flags(model, is_qat=False)]
    decisions += float_model.decide_leftovers(working, request.settings.preserved_attributes)
    decisions += decide_unmatched_settings(working, request.settings)
    if request.quantizer is None:
        decisions += decide_unmatched_rules(working, request.rules)
        decisions += float_model.decide_parametrizations(model, request.rules, is_qat=request.is_qat)
    return tuple(decisions)
