"""``explain``: the decisions taken about a model, from the first module to the last part of a cell."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node

from torchq_compat.capture.origins import is_fx_leaf
from torchq_compat.custom_modules.registry import handler_of
from torchq_compat.graph.graph_module import QuantizationGraphModule, record_of
from torchq_compat.opaque_calls.opaque_module import OpaqueModule
from torchq_compat.qspecs.qdq import QUANTIZE
from torchq_compat.support.argument_checks import checked_arguments, instance_of
from torchq_compat.support.decisions import Action, Decision, Report

__all__ = ["explain"]


@checked_arguments(model=instance_of(nn.Module, what="an nn.Module"))
def explain(model: nn.Module) -> Report:
    """Say what is quantized in ``model`` and what is not, and why.

    Args:
        model: a float, prepared or converted model.

    Returns:
        A printable report; ``report.as_dicts()`` and ``report.to_json()`` give it to machines.

    Example:
        >>> import torch
        >>> from torch.ao.quantization import get_default_qconfig_mapping
        >>> from torchq_compat import explain, prepare_fx
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(4, 2)).eval(), torch.randn(3, 4)
        >>> prepared = prepare_fx(model, get_default_qconfig_mapping("x86"), (x,))
        >>> explain(prepared).find("0")[0].action.value
        'quantized'
    """
    record = record_of(model)
    if record is None or not isinstance(model, QuantizationGraphModule):
        return Report(tuple(_of_float_model(model)))
    lowering, model = model.lowering, model.reference
    nodes = {node.name: node for node in model.graph.nodes}
    decisions: list[Decision] = []
    on_integers = {each.node for each in lowering if each.action is Action.LOWERED and each.node}
    for decision in record.decisions:
        if decision.action is Action.FLOAT and decision.node in on_integers:
            continue  # The lowering says what runs, and that the configuration left it float.
        # Behind a float op a consumer's own quantize may follow; that says nothing about the op.
        node = None if decision.action is Action.FLOAT else nodes.get(decision.node)
        decisions.append(replace(decision, details=_details(model, node)))
        decisions.extend(_inside(model, decision))
    return Report((*decisions, *lowering))


def _of_float_model(model: nn.Module) -> Iterator[Decision]:
    for path, module in model.named_modules():
        if path and is_fx_leaf(module) and not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            yield Decision(path, type(module).__name__, Action.FLOAT, "the model has not been prepared")


def _inside(model: GraphModule, decision: Decision) -> Iterator[Decision]:
    if decision.node or decision.action is Action.FLOAT:
        return
    opaque = dict(model.named_modules()).get(decision.path)
    handler = handler_of(opaque)
    if handler is not None and isinstance(opaque, OpaqueModule):
        yield from handler.explain(opaque, decision.path, explain)


def _details(model: GraphModule, node: Node | None) -> dict[str, Any]:
    for user in node.users if node else ():
        if user.target is QUANTIZE:
            _, scale, zero_point, _, _, dtype = user.args
            return {"dtype": dtype, "scale": scale, "zero_point": zero_point}
    return {}
