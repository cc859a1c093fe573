"""The observed modules behind the opaque calls of a captured model, and the specs around each call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import nn
from torch.fx import GraphModule, Node

from torchq_compat.annotate.call_boundary import OpaqueBoundary
from torchq_compat.annotate.op_records import module_record, write_op_records
from torchq_compat.custom_modules.registry import ObserveRequest, WriteOps, handler_of
from torchq_compat.custom_modules.swap import Swap
from torchq_compat.opaque_calls.insert_calls import example_call, insert_calls, opaque_call_nodes
from torchq_compat.opaque_calls.opaque_module import OpaqueModule
from torchq_compat.opaque_calls.recorded_calls import RecordedCalls
from torchq_compat.pipeline.capture_model import CapturedModel
from torchq_compat.support.decisions import Action, Decision
from torchq_compat.support.model_copies import copied_model

__all__ = ["boundaries_of", "loses_forward", "maps_to_users_class", "observe_modules", "place_modules"]

PrepareInside = Callable[[ObserveRequest], GraphModule]


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
    graph_module = captured.found.graph_module
    copied = insert_calls(graph_module, captured.stubs, modules, writers)
    classes = {swap.paths[0]: type(swap.module) for swap in swaps}
    write_op_records(
        (node, module_record(classes[str(node.target)], str(node.target)))
        for node in opaque_call_nodes(graph_module)
    )
    return [_copied_parameter(name, is_qat=is_qat) for name in copied]


def boundaries_of(
    graph_module: GraphModule, swaps: Sequence[Swap], calls: RecordedCalls
) -> Mapping[Node, OpaqueBoundary]:
    """Return the specs around each call, after a trial of the call with its tensors of the example run.

    Raises:
        CustomModuleError: an observed module does not accept the calls of the float one.
    """
    by_path = {swap.paths[0]: swap for swap in swaps}
    boundaries: dict[Node, OpaqueBoundary] = {}
    for node in opaque_call_nodes(graph_module):
        path, index = str(node.target), node.kwargs["opaque_layout"]
        request, opaque = by_path[path].request, graph_module.get_submodule(path)
        handler = handler_of(opaque)
        assert isinstance(opaque, OpaqueModule)
        assert isinstance(index, int)
        assert request is not None
        assert handler is not None
        if path in calls.tensors:
            arguments, expected = example_call(node, opaque, calls.tensors[path][index])
            handler.check_call(copied_model(opaque), path, index, arguments, expected)
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
