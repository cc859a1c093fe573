"""Captures a float model with its custom modules as opaque calls, and puts the observed modules behind
them.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.quantizer import Quantizer

from torchq_compat.annotate.annotation import module_record, write_op_records
from torchq_compat.annotate.quantizers import QuantizerFailedError, UserQuantizer, annotated_points, own_copy
from torchq_compat.annotate.sharing import has_several
from torchq_compat.capture import opaque_calls, torch_export
from torchq_compat.capture.checked import Attempt, CaptureCase, capture_checked
from torchq_compat.capture.opaque_stub import RecordedCalls, StubRegistry, recording
from torchq_compat.capture.rank_trials import other_ranks
from torchq_compat.capture.sizes.size_reads import ReadSizes
from torchq_compat.capture.trial_runs import FloatRun, Runs, trial_copy
from torchq_compat.capture.unseen_python import show_identities
from torchq_compat.custom_modules import handler_of
from torchq_compat.errors import InputError
from torchq_compat.model.graph_module import QuantizationGraphModule
from torchq_compat.model.signature import CallSignature
from torchq_compat.modules.registry import ObserveRequest, WriteOps
from torchq_compat.modules.swap import Swap, apply_swaps
from torchq_compat.quantize.request import PrepareRequest, WithLoops
from torchq_compat.support.decisions import Action, Decision
from torchq_compat.support.graph_nodes import module_path_of
from torchq_compat.support.upstream import pytree
from torchq_compat.support.user_warnings import logs_held_back

# Runs the float model on its example inputs, and captures it with its custom modules as opaque calls.


@dataclass(frozen=True)
class TriedModel:
    """A float model and its run on the example inputs.

    Attributes:
        runs: runs the float model.
        example: the run on the example inputs.
        read: what Python decided by sizes before loops were rolled.
        calls: the recorded calls of custom modules.
    """

    runs: Runs
    example: FloatRun
    read: ReadSizes
    calls: RecordedCalls

    @property
    def problem(self) -> InputError | None:
        """The error for example inputs that the float model fails on, or None. torch.export accepts some that
        no kernel does, such as integers for a float linear."""
        if self.example.error is None:
            return None
        return InputError.does_not_fit(type(self.runs.model).__name__, self.example.error)


@dataclass(frozen=True)
class CapturedModel:
    """A float model and its captured graph.

    Attributes:
        case: the model that was captured, its inputs, and the runs of the float model.
        attempt: the graph, with custom modules as opaque ops, and the sizes it accepts.
    """

    case: CaptureCase
    attempt: Attempt

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
    modules = {swap.paths[0]: swap.module for swap in swaps}
    runs = Runs(trial_copy(working), StubRegistry(), modules, example=request.example_inputs)
    checked = [swap.paths[0] for swap in swaps if swap.request is not None and swap.handler.checks_calls]
    recorded = [] if request.is_qat or with_loops.steps else checked
    _register_dataclasses(request.example_inputs)
    calls: RecordedCalls = {}

    def watching(model: nn.Module) -> AbstractContextManager[None]:
        return recording(calls, {path: model.get_submodule(path) for path in recorded})

    example = with_loops.example
    # Hooks, which counted the calls of modules, break the loops of torch's own operators.
    if recorded or example is None or example.error is not None:
        example = runs.of_float_model(request.example_inputs, watching=watching)
    _register_dataclasses(example.value)
    return TriedModel(runs, example, with_loops.read, calls)


def _register_dataclasses(nested: Any) -> None:
    """Let torch.export take dataclasses among the arguments and results of a model, as FX does."""
    for leaf in pytree.tree_leaves(nested):
        kind = type(leaf)
        if is_dataclass(kind) and kind not in pytree.SUPPORTED_NODES:
            name = f"{kind.__module__}.{kind.__qualname__}"
            torch.export.register_dataclass(kind, serialized_type_name=name)
            _register_dataclasses(leaf)


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
        InputError: the float model does not accept the example inputs.
    """
    args, stubs = request.example_inputs, tried.runs.stubs
    apply_swaps(working, swaps, stubs)
    show_identities(working)
    inputs = signature.labelled(args)
    case = CaptureCase(
        working,
        args,
        inputs,
        request.dynamic_shapes,
        tried.runs,
        tried.example,
        is_step=request.is_step,
        read=tried.read,
    )
    try:
        with logs_held_back(torch_export.OF_ATTEMPTS):
            case, result = capture_checked(case)
            result.sizes = replace(result.sizes, other_ranks=other_ranks(case, result))
    except Exception as cause:
        raise torch_export.explain_failure(model, args, cause) from torch_export.without_frames_of_torch(
            cause
        )
    if tried.problem is not None:
        raise tried.problem
    return CapturedModel(case, result)


# The observed modules behind the opaque calls of a captured model, and the specs around each call.


PrepareInside = Callable[[ObserveRequest], QuantizationGraphModule]


def observe_modules(
    captured: CapturedModel, swaps: Sequence[Swap], prepare_inside: PrepareInside
) -> dict[str, nn.Module]:
    """Return the observed module of each custom module, by path; a module that is never called is unchanged.

    Args:
        prepare_inside: prepares a standalone module as a model of its own.
    """
    called = {swap.paths[0] for swap in swaps if captured.stubs.layouts(swap.paths[0])}
    return {
        swap.paths[0]: _observed(swap, prepare_inside) if swap.paths[0] in called else swap.module
        for swap in swaps
    }


def place_modules(
    captured: CapturedModel,
    swaps: Sequence[Swap],
    modules: dict[str, nn.Module],
    writers: Mapping[str, WriteOps],
    *,
    is_qat: bool,
) -> list[Decision]:
    """Put ``modules`` behind the opaque calls, in place, or write them as ops; return a decision about each
    of their parameters that the graph has a copy of."""
    graph_module = captured.attempt.graph_module
    copied = opaque_calls.insert_calls(graph_module, captured.stubs, modules, writers)
    opaque_calls.check_forms(captured.stubs, modules)
    classes = {swap.paths[0]: type(swap.module) for swap in swaps}
    write_op_records(
        (node, module_record(classes[str(node.target)], str(node.target)))
        for node in opaque_calls.opaque_call_nodes(graph_module)
    )
    return [_copied_parameter(name, is_qat=is_qat) for name in copied]


def boundaries_of(
    graph_module: GraphModule, swaps: Sequence[Swap], calls: RecordedCalls
) -> Mapping[Node, opaque_calls.OpaqueBoundary]:
    """Return the specs around each call, after a trial of the call with its tensors of the example run.

    Raises:
        CustomModuleError: an observed module does not accept the calls of the float one.
    """
    by_path = {swap.paths[0]: swap for swap in swaps}
    boundaries: dict[Node, opaque_calls.OpaqueBoundary] = {}
    for node, opaque in opaque_calls.opaque_call_nodes(graph_module).items():
        path, index = str(node.target), opaque_calls.layout_index(node)
        request, handler = by_path[path].request, handler_of(opaque)
        assert request is not None
        assert handler is not None
        if path in calls:
            arguments, expected = opaque_calls.example_call(node, opaque, calls[path][index])
            handler.check_call(opaque, path, index, arguments, expected)
        boundaries[node] = handler.boundary(opaque, request, opaque.opaque_layouts[index])
    return boundaries


def maps_to_users_class(swap: Swap) -> bool:
    """Return whether the observed class is the user's own, which may compute something else than the float
    one."""
    if swap.request is None:
        return False
    is_known = swap.request.observed_class.__module__.startswith(("torchq_compat.", "torch.ao."))
    return swap.handler.is_fallback or not is_known


def loses_forward(swap: Swap) -> bool:
    """Return whether the float module has a ``forward`` of its own that is no longer called."""
    return swap.request is not None and swap.handler.loses_forward(swap.module)


def _observed(swap: Swap, prepare_inside: PrepareInside) -> nn.Module:
    if swap.request is None:
        # torchao's convert reads .qconfig of every module class FX could quantize dynamically.
        vars(swap.module)["qconfig"] = None
        return swap.module
    observed = swap.handler.observe(replace(swap.request, prepare_inside=prepare_inside))
    observed.opaque_observed_class = swap.request.observed_class
    observed.opaque_quant_type = swap.request.specs.quant_type
    return observed


def _copied_parameter(name: str, *, is_qat: bool) -> Decision:
    reason = "the model itself reads it, from a copy in floats"
    return Decision(
        name,
        "parameter",
        Action.FLOAT,
        f"{reason}, which training the custom module does not change" if is_qat else reason,
        warn=is_qat,
    )


# Which custom modules a user's Quantizer quantizes, and which this package does.
#
# This package quantizes the modules that a custom config maps. A module that nothing maps, which would be a
# float call in the graph, is left to the Quantizer if the Quantizer annotates the module's ops; a trial on a
# copy of the graph shows whether it does.


def share_modules(
    captured: CapturedModel,
    swaps: Sequence[Swap],
    modules: dict[str, nn.Module],
    decisions: Sequence[Decision],
    quantizer: Quantizer | None,
    *,
    is_fixed: bool,
) -> tuple[Mapping[str, WriteOps], list[Decision]]:
    """Return the writers, by path, of the modules that ``quantizer`` annotates as ops, and the ``decisions``
    that remain.

    Args:
        is_fixed: whether every size is that of the example.

    Raises:
        QuantizerFailedError: ``quantizer`` fails on free sizes, and does not on fixed ones.
    """
    candidates = {} if quantizer is None else _candidates(captured, swaps)
    if quantizer is None or not candidates:
        return {}, list(decisions)
    expected, why_not = _expected(captured, modules, candidates, quantizer, is_fixed=is_fixed)
    kept = []
    for decision in decisions:
        if decision.path in expected:
            continue  # The graph has the Quantizer's decision.
        if decision.path in candidates and decision.action is Action.FLOAT:
            decision = replace(decision, reason=f"{decision.reason}; {why_not}")
        kept.append(decision)
    return {path: candidates[path] for path in expected}, kept


def _candidates(captured: CapturedModel, swaps: Sequence[Swap]) -> dict[str, WriteOps]:
    result = {}
    for swap in swaps:
        write = None if swap.request is not None else swap.handler.ops_writer(swap.module)
        if write is not None and captured.stubs.layouts(swap.paths[0]):
            result[swap.paths[0]] = write
    return result


def _expected(
    captured: CapturedModel,
    modules: dict[str, nn.Module],
    candidates: Mapping[str, WriteOps],
    quantizer: Quantizer,
    *,
    is_fixed: bool,
) -> tuple[set[str], str]:
    """Return the paths of the candidates whose ops ``quantizer`` annotates, and why the others stay float."""
    name = type(quantizer).__name__

    def asked(*, is_fixed: bool) -> tuple[GraphModule, set[str]]:
        trial = copy.deepcopy(captured.attempt.graph_module)
        opaque_calls.insert_calls(trial, captured.stubs, modules, candidates)
        written = _module_paths(trial) & candidates.keys()
        return UserQuantizer(own_copy(quantizer), {}, trial, is_fixed=is_fixed).ask(trial), written

    try:
        trial, written = asked(is_fixed=is_fixed)
    except QuantizerFailedError as failed:
        works_fixed = False
        with suppress(QuantizerFailedError):
            works_fixed = not is_fixed and bool(asked(is_fixed=True))
        if works_fixed:
            raise
        # Without the written ops the Quantizer may succeed; if not, it raises the same error on the graph.
        first_line = str(failed).strip().split("\n", 1)[0]
        return set(), f"{name} fails on its ops: {type(failed.raised).__name__}: {first_line}"
    # An op whose results are no longer read was rewritten by the Quantizer as ops of its own.
    annotated, read = (_module_paths(trial, accepts) for accepts in (_is_annotated, _is_read))
    expected = (written & annotated) | (written - read)
    return expected, f"{name} does not annotate its ops either"


def _is_annotated(node: Node) -> bool:
    """Return whether ``node`` is annotated, at an input or at one of its outputs."""
    return bool(annotated_points(node)) or any(annotated_points(user) for user in node.users)


def _is_read(node: Node) -> bool:
    """Return whether an output of ``node`` is used. A recurrent operator without readers stays in the graph,
    because it may draw random numbers."""
    return any(user.users for user in node.users)


def _module_paths(graph_module: GraphModule, accepts: Callable[[Node], bool] = lambda node: True) -> set[str]:
    """Return the module paths of the ops with several outputs that ``accepts`` is true of."""
    return {
        module_path_of(node).partition("@")[0]
        for node in graph_module.graph.nodes
        if node.op == "call_function" and has_several(node) and accepts(node)
    }
