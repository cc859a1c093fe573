"""Prepare: read arguments in, observed model out; one stage after the other."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from torchq_compat.annotate.annotation import NodeSpecs
from torchq_compat.annotate.decide import decide_graph
from torchq_compat.annotate.leaf_boundary import LeafBoundary
from torchq_compat.capture.export import capture, explain_failure
from torchq_compat.capture.identities import show_identities
from torchq_compat.capture.leftovers import decide_leftovers
from torchq_compat.custom_modules.leaf_module import LeafModule
from torchq_compat.custom_modules.leaf_nodes import example_call, leaf_nodes, place_leaves
from torchq_compat.custom_modules.leaf_op import CaptureSession
from torchq_compat.custom_modules.registry import handler_of
from torchq_compat.custom_modules.swap import Swap, apply_swaps, decide_swaps
from torchq_compat.decisions import Action, Decision
from torchq_compat.errors import InputError
from torchq_compat.graph_module import CallSignature, ModelRecord, QuantizationGraphModule, Stage
from torchq_compat.legacy.backend_configs import BackendTable
from torchq_compat.legacy.custom_configs import PrepareSettings
from torchq_compat.legacy.qconfig_mappings import QConfigRules
from torchq_compat.observed_graph import prepare_graph
from torchq_compat.user_warnings import warn_user

__all__ = ["PrepareRequest", "prepare"]


@dataclass(frozen=True)
class PrepareRequest:
    """The arguments of prepare_fx or prepare_qat_fx, read."""

    rules: QConfigRules
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
    graph_module, copied = _capture_around(working, model, swaps, request)
    decisions.extend(_copied_parameter(name, is_qat=request.is_qat) for name in copied)
    boundaries = _boundaries(graph_module, swaps)
    kept_float = _kept_float(working, request.settings)

    def decide(captured: GraphModule) -> dict[Node, NodeSpecs]:
        decided = decide_graph(captured, working, request.rules, request.backend, boundaries, kept_float)
        named = {decision.path for decision in decisions}
        decisions.extend(decision for decision in decided.decisions if decision.path not in named)
        return decided.specs

    signature = signature.with_sizes_of(graph_module, request.example_inputs)
    prepared = prepare_graph(graph_module, decide, is_qat=request.is_qat)
    record = ModelRecord(Stage.PREPARED, signature, tuple(decisions), request.is_qat)
    preserved = {
        name: getattr(working, name)
        for name in request.settings.preserved_attributes
        if hasattr(working, name)
    }
    _warn(record.decisions)
    return QuantizationGraphModule.wrap(prepared, record, preserved)


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
            working(*copy.deepcopy(args))
    except Exception as cause:
        return InputError.does_not_fit(type(working).__name__, cause)
    return None


def _capture_around(
    working: nn.Module, model: nn.Module, swaps: list[Swap], request: PrepareRequest
) -> tuple[GraphModule, list[str]]:
    """Capture ``working`` with leaf calls, then put the observed modules behind them.

    Also returns the parameters of custom modules that the graph has copies of.
    """
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
    modules = {
        swap.paths[0]: _behind(swap) if session.layouts(swap.paths[0]) else swap.module for swap in swaps
    }
    return graph_module, place_leaves(graph_module, session, modules)


def _copied_parameter(name: str, *, is_qat: bool) -> Decision:
    reason = "the model itself reads it, from a copy in floats"
    return Decision(
        name,
        "parameter",
        Action.FLOAT,
        f"{reason}, which training the custom module does not change" if is_qat else reason,
        warn=is_qat,
    )


def _behind(swap: Swap) -> nn.Module:
    if swap.request is None:
        # torchao's convert reads .qconfig of every module class FX could quantize dynamically.
        vars(swap.module)["qconfig"] = None
        return swap.module
    observed = swap.handler.observe(swap.request)
    observed.leaf_observed_class = swap.request.observed_class
    observed.leaf_quant_type = swap.request.specs.quant_type
    return observed


def _boundaries(graph_module: GraphModule, swaps: list[Swap]) -> dict[Node, LeafBoundary]:
    by_path = {swap.paths[0]: swap for swap in swaps}
    boundaries = {}
    for node in leaf_nodes(graph_module):
        path, index = str(node.target), node.kwargs["leaf_layout"]
        request, leaf = by_path[path].request, graph_module.get_submodule(path)
        handler = handler_of(leaf)
        assert isinstance(leaf, LeafModule)
        assert isinstance(index, int)
        assert request is not None
        assert handler is not None
        arguments, expected = example_call(node, leaf)
        handler.check_call(copy.deepcopy(leaf), path, index, arguments, expected)
        boundaries[node] = handler.boundary(leaf, request, leaf.leaf_layouts[index])
    return boundaries


def _kept_float(model: nn.Module, settings: PrepareSettings) -> tuple[str, ...]:
    classes = settings.kept_float_classes
    return (*settings.kept_float_names, *(p for p, m in model.named_modules() if type(m) in classes))


def _warn(decisions: tuple[Decision, ...]) -> None:
    for decision in decisions:
        if decision.warn:
            outcome = "stays float" if decision.action is Action.FLOAT else f"is {decision.action.value}"
            warn_user(f"{decision.kind} at {decision.path!r} {outcome}: {decision.reason}")
