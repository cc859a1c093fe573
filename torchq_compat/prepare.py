"""Prepare: read arguments in, observed model out; one stage after the other."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.quantizer import Quantizer

from torchq_compat.annotate.leaf_boundary import LeafBoundary
from torchq_compat.annotate.op_records import OpRecord, module_record, write_op_records
from torchq_compat.capture.export import capture, copied_inputs, explain_failure
from torchq_compat.capture.identities import show_identities
from torchq_compat.capture.leftovers import decide_leftovers
from torchq_compat.capture.training_flags import decide_training_flags
from torchq_compat.capture.unmatched_rules import decide_unmatched_rules
from torchq_compat.cumulative_batch_norm import average_cumulatively, give_momentum
from torchq_compat.custom_modules.leaf_module import LeafModule
from torchq_compat.custom_modules.leaf_nodes import example_call, leaf_nodes, place_leaves
from torchq_compat.custom_modules.leaf_op import CaptureSession
from torchq_compat.custom_modules.registry import ObserveRequest, handler_of
from torchq_compat.custom_modules.swap import Swap, apply_swaps, decide_swaps
from torchq_compat.decisions import Action, Decision
from torchq_compat.errors import InputError
from torchq_compat.graph_module import CallSignature, ModelRecord, QuantizationGraphModule, Stage
from torchq_compat.legacy.backend_configs import BackendTable
from torchq_compat.legacy.custom_configs import PrepareSettings
from torchq_compat.legacy.qconfig_mappings import QConfigRules
from torchq_compat.observing import Captured, observe_by_quantizer, observe_by_rules
from torchq_compat.quantized_interface import QuantizedInterface
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

    def inside(self, inner: ObserveRequest) -> PrepareRequest:
        """The arguments to prepare a standalone module with."""
        standalone = inner.standalone
        assert standalone is not None
        return PrepareRequest(
            rules=standalone.rules or QConfigRules.of_global(inner.qconfig),
            quantizer=self.quantizer if standalone.rules is None else None,
            example_inputs=standalone.example_inputs,
            settings=standalone.settings,
            backend=standalone.backend or self.backend,
            dynamic_shapes=None,
            is_qat=self.is_qat,
        )


def prepare(model: nn.Module, request: PrepareRequest) -> QuantizationGraphModule:
    """An observed copy of ``model``, which stays as it is.

    Raises:
        TorchQCompatError: see the doors in ``quantize_fx``.
    """
    _check_model(model)
    working = copy.deepcopy(model).train(request.is_qat)
    cumulative = give_momentum(working)
    signature = _signature(working, request.example_inputs)
    swaps, decisions = decide_swaps(working, request.rules, request.settings, request.backend)
    leftovers = _leftovers(model, working, request)
    session = CaptureSession()
    graph_module, copied = _capture_around(working, model, swaps, request, session)
    decisions.extend(_copied_parameter(name, is_qat=request.is_qat) for name in copied)
    interface = _interface(graph_module, request, session)
    boundaries = _boundaries(graph_module, swaps, session)
    write_op_records(_leaf_records(graph_module, swaps))
    signature = signature.with_sizes_of(graph_module, request.example_inputs)
    captured = Captured(graph_module, working, boundaries, interface)
    prepared, decided = _observe(captured, request)
    average_cumulatively(prepared, cumulative)
    named = {decision.path for decision in decisions}
    decisions.extend(decision for decision in decided if decision.path not in named)
    record = ModelRecord(
        Stage.PREPARED,
        signature,
        (*leftovers, *decisions),
        request.is_qat,
        request.rules if request.quantizer is None else None,
        interface,
    )
    preserved = {
        name: getattr(working, name)
        for name in request.settings.preserved_attributes
        if hasattr(working, name)
    }
    _warn(record.decisions)
    return QuantizationGraphModule.wrap(prepared, record, preserved)


def _observe(captured: Captured, request: PrepareRequest) -> tuple[GraphModule, tuple[Decision, ...]]:
    if request.quantizer is not None:
        return observe_by_quantizer(captured, request.quantizer, is_qat=request.is_qat)
    return observe_by_rules(captured, request.rules, request.backend, is_qat=request.is_qat)


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


def _check_runs(
    working: nn.Module, args: tuple[Any, ...], swaps: list[Swap], session: CaptureSession
) -> InputError | None:
    """What is wrong with ``args``: torch.export accepts some no kernel does, integers for a float linear.

    In evaluation only: a run in training would move batch norm's statistics. The session remembers what the
    custom modules were called with.
    """
    if working.training:
        return None
    try:
        recording = session.recording({swap.paths[0]: swap.module for swap in swaps})
        with torch.no_grad(), torch.random.fork_rng(devices=[]), recording:
            working(*copied_inputs(args))
    except Exception as cause:
        return InputError.does_not_fit(type(working).__name__, cause)
    return None


def _capture_around(
    working: nn.Module,
    model: nn.Module,
    swaps: list[Swap],
    request: PrepareRequest,
    session: CaptureSession,
) -> tuple[GraphModule, list[str]]:
    """Capture ``working`` with leaf calls, then put the observed modules behind them.

    Also returns the parameters of custom modules that the graph has copies of.
    """
    problem = _check_runs(working, request.example_inputs, swaps, session)
    apply_swaps(working, swaps, session)
    show_identities(working)
    watching = session.watch(working)
    try:
        with session.active():
            graph_module = capture(working, request.example_inputs, request.dynamic_shapes)
    except Exception as cause:
        raise explain_failure(model, request.example_inputs, cause) from cause
    finally:
        watching.remove()
    if problem is not None:
        raise problem
    modules = {
        swap.paths[0]: _behind(swap, request) if session.layouts(swap.paths[0]) else swap.module
        for swap in swaps
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


def _interface(
    graph_module: GraphModule, request: PrepareRequest, session: CaptureSession
) -> QuantizedInterface:
    settings = request.settings
    return QuantizedInterface.read(
        settings.input_quantized_indexes,
        settings.output_quantized_indexes,
        request.example_inputs,
        graph_module,
        whole_result=session.returns_whole_result,
    )


def _behind(swap: Swap, request: PrepareRequest) -> nn.Module:
    if swap.request is None:
        # torchao's convert reads .qconfig of every module class FX could quantize dynamically.
        vars(swap.module)["qconfig"] = None
        return swap.module

    def prepare_inside(inner: ObserveRequest) -> GraphModule:
        return prepare(inner.module, request.inside(inner))

    observed = swap.handler.observe(replace(swap.request, prepare_inside=prepare_inside))
    observed.leaf_observed_class = swap.request.observed_class
    observed.leaf_quant_type = swap.request.specs.quant_type
    return observed


def _boundaries(
    graph_module: GraphModule, swaps: list[Swap], session: CaptureSession
) -> dict[Node, LeafBoundary]:
    by_path = {swap.paths[0]: swap for swap in swaps}
    boundaries: dict[Node, LeafBoundary] = {}
    for node in leaf_nodes(graph_module):
        path, index = str(node.target), node.kwargs["leaf_layout"]
        request, leaf = by_path[path].request, graph_module.get_submodule(path)
        handler = handler_of(leaf)
        assert isinstance(leaf, LeafModule)
        assert isinstance(index, int)
        assert request is not None
        assert handler is not None
        if path in session.examples:
            arguments, expected = example_call(node, leaf, session.examples[path][index])
            handler.check_call(copy.deepcopy(leaf), path, index, arguments, expected)
        boundaries[node] = handler.boundary(leaf, request, leaf.leaf_layouts[index])
    return boundaries


def _leaf_records(graph_module: GraphModule, swaps: list[Swap]) -> Iterator[tuple[Node, OpRecord]]:
    classes = {swap.paths[0]: type(swap.module) for swap in swaps}
    for node in leaf_nodes(graph_module):
        yield node, module_record(classes[str(node.target)], str(node.target))


def _leftovers(model: nn.Module, working: nn.Module, request: PrepareRequest) -> tuple[Decision, ...]:
    """Decisions about what is no module of the graph: flags, attributes, hooks, rules."""
    return (
        *decide_training_flags(model, is_qat=request.is_qat),
        *decide_leftovers(working, request.settings.preserved_attributes),
        *(decide_unmatched_rules(working, request.rules) if request.quantizer is None else ()),
    )


def _warn(decisions: tuple[Decision, ...]) -> None:
    for decision in decisions:
        if decision.warn:
            outcome = "stays float" if decision.action is Action.FLOAT else f"is {decision.action.value}"
            warn_user(f"{decision.kind} at {decision.path!r} {outcome}: {decision.reason}")
