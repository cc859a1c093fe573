"""Prepare: read arguments in, observed model out; one stage after the other."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.quantizer import Quantizer

from torchq_compat.annotate.annotation import NodeSpecs
from torchq_compat.annotate.decide import LeafBoundary, decide_graph
from torchq_compat.annotate.foreign import QuantizerAroundLeaves
from torchq_compat.annotate.op_records import OpRecord, module_record, write_op_records
from torchq_compat.capture.export import capture, copied_inputs, explain_failure
from torchq_compat.capture.identities import show_identities
from torchq_compat.capture.leftovers import decide_leftovers
from torchq_compat.capture.unmatched_rules import decide_unmatched_rules
from torchq_compat.custom_modules.leaf_module import LeafModule
from torchq_compat.custom_modules.leaf_nodes import leaf_nodes, place_leaves
from torchq_compat.custom_modules.leaf_op import CaptureSession
from torchq_compat.custom_modules.swap import Swap, apply_swaps, decide_swaps
from torchq_compat.decisions import Action, Decision
from torchq_compat.errors import InputError
from torchq_compat.graph_module import CallSignature, ModelRecord, QuantizationGraphModule, Stage
from torchq_compat.legacy.backend_configs import BackendTable
from torchq_compat.legacy.custom_configs import PrepareSettings
from torchq_compat.legacy.qconfig_mappings import QConfigRules
from torchq_compat.observed_graph import prepare_graph, prepare_with
from torchq_compat.user_warnings import warn_user

__all__ = ["PrepareRequest", "prepare"]


@dataclass(frozen=True)
class PrepareRequest:
    """The arguments of prepare_fx or prepare_qat_fx, read.

    Attributes:
        rules: the QConfigMapping; the default one, for custom modules alone, where ``quantizer`` is given.
        quantizer: annotates all that is no custom module, in place of ``rules`` and ``backend``.
    """

    rules: QConfigRules
    quantizer: Quantizer | None
    example_inputs: tuple[Any, ...]
    settings: PrepareSettings
    backend: BackendTable
    dynamic_shapes: Any
    is_qat: bool


def prepare(model: nn.Module, request: PrepareRequest) -> QuantizationGraphModule:
    """An observed copy of ``model``, which stays as it is.

    Raises:
        TorchQCompatError: see the doors in ``quantize_fx``.
    """
    _check_model(model)
    working = copy.deepcopy(model)
    if working.training != request.is_qat:
        working.train(request.is_qat)
    signature = _signature(working, request.example_inputs)
    swaps, decisions = decide_swaps(working, request.rules, request.settings)
    decisions.extend(decide_leftovers(working, request.settings.preserved_attributes))
    if request.quantizer is None:
        decisions.extend(decide_unmatched_rules(working, request.rules))
    graph_module = _capture_around(working, model, swaps, request)
    boundaries = _boundaries(graph_module, swaps)
    write_op_records(_leaf_records(graph_module, swaps))
    kept_float = _kept_float(working, request.settings)
    signature = signature.with_sizes_of(graph_module, request.example_inputs)
    observe = _observe_by_rules if request.quantizer is None else _observe_by_quantizer
    prepared, decided = observe(graph_module, working, boundaries, kept_float, request)
    named = {decision.path for decision in decisions}
    decisions.extend(decision for decision in decided if decision.path not in named)
    rules = request.rules if request.quantizer is None else None
    record = ModelRecord(Stage.PREPARED, signature, tuple(decisions), request.is_qat, rules)
    preserved = {
        name: getattr(working, name)
        for name in request.settings.preserved_attributes
        if hasattr(working, name)
    }
    _warn(record.decisions)
    return QuantizationGraphModule.wrap(prepared, record, preserved)


Observed = tuple[GraphModule, tuple[Decision, ...]]
Boundaries = dict[Node, LeafBoundary]


def _observe_by_rules(
    graph_module: GraphModule,
    model: nn.Module,
    boundaries: Boundaries,
    kept_float: tuple[str, ...],
    request: PrepareRequest,
) -> Observed:
    decisions: list[Decision] = []

    def decide(captured: GraphModule) -> dict[Node, NodeSpecs]:
        decided = decide_graph(captured, model, request.rules, request.backend, boundaries, kept_float)
        decisions.extend(decided.decisions)
        write_op_records(decided.records)
        return decided.specs

    return prepare_graph(graph_module, decide, is_qat=request.is_qat), tuple(decisions)


def _observe_by_quantizer(
    graph_module: GraphModule,
    model: nn.Module,
    boundaries: Boundaries,
    kept_float: tuple[str, ...],
    request: PrepareRequest,
) -> Observed:
    assert request.quantizer is not None
    quantizer = QuantizerAroundLeaves(request.quantizer, boundaries, kept_float, model)
    prepared = prepare_with(graph_module, quantizer, is_qat=request.is_qat)
    return prepared, quantizer.decisions


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(
            f"the model must be an nn.Module, got {type(model).__name__}.",
            hint="pass the float model itself.",
        )


def _signature(model: nn.Module, args: tuple[Any, ...]) -> CallSignature:
    try:
        return CallSignature.of(model, args)
    except ValueError as cause:
        raise InputError.does_not_fit(type(model).__name__, cause) from cause


def _check_runs(working: nn.Module, args: tuple[Any, ...]) -> InputError | None:
    """What is wrong with ``args``: torch.export accepts some no kernel does, integers for a float linear.

    In evaluation only: a run in training would move batch norm's statistics.
    """
    if working.training:
        return None
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            working(*copied_inputs(args))
    except Exception as cause:
        return InputError.does_not_fit(type(working).__name__, cause)
    return None


def _capture_around(
    working: nn.Module, model: nn.Module, swaps: list[Swap], request: PrepareRequest
) -> GraphModule:
    """Capture ``working`` with leaf calls, then put the observed modules behind them."""
    problem = _check_runs(working, request.example_inputs)
    session = CaptureSession()
    apply_swaps(working, swaps, session)
    show_identities(working)
    try:
        with session.active():
            graph_module = capture(working, request.example_inputs, request.dynamic_shapes)
    except Exception as cause:
        raise explain_failure(model, request.example_inputs, cause) from cause
    if problem is not None:
        raise problem
    called = [swap for swap in swaps if session.layouts(swap.paths[0])]
    place_leaves(graph_module, session, {swap.paths[0]: _behind(swap) for swap in called})
    return graph_module


def _behind(swap: Swap) -> nn.Module:
    if swap.request is None:
        # torchao's convert reads .qconfig of every module class FX could quantize dynamically.
        vars(swap.module)["qconfig"] = None
        return swap.module
    observed = swap.handler.observe(swap.request)
    observed.observed_class = swap.request.observed_class
    return observed


def _boundaries(graph_module: GraphModule, swaps: list[Swap]) -> Boundaries:
    by_path = {swap.paths[0]: swap for swap in swaps}
    boundaries: Boundaries = {}
    for node in leaf_nodes(graph_module):
        swap = by_path[str(node.target)]
        leaf = graph_module.get_submodule(str(node.target))
        assert isinstance(leaf, LeafModule)
        assert swap.request is not None
        specs, output_dtypes = swap.request.specs, swap.handler.output_dtypes(leaf)
        accepted = frozenset(d for d in (*output_dtypes, specs.activation_dtype) if d is not None)
        boundaries[node] = LeafBoundary(specs.activation, accepted, output_dtypes)
    return boundaries


def _leaf_records(graph_module: GraphModule, swaps: list[Swap]) -> Iterator[tuple[Node, OpRecord]]:
    classes = {swap.paths[0]: type(swap.module) for swap in swaps}
    for node in leaf_nodes(graph_module):
        yield node, module_record(classes[str(node.target)], str(node.target))


def _kept_float(model: nn.Module, settings: PrepareSettings) -> tuple[str, ...]:
    classes = settings.kept_float_classes
    return (*settings.kept_float_names, *(p for p, m in model.named_modules() if type(m) in classes))


def _warn(decisions: tuple[Decision, ...]) -> None:
    for decision in decisions:
        if decision.warn:
            outcome = "stays float" if decision.action is Action.FLOAT else f"is {decision.action.value}"
            warn_user(f"{decision.kind} at {decision.path!r} {outcome}: {decision.reason}")
