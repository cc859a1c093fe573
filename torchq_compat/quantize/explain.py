"""``explain``: reports the decisions about a model, from the first module to the last part of a cell."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from torchq_compat.annotate.observed_graph import observer_nodes
from torchq_compat.capture.opaque_calls import OpaqueModule
from torchq_compat.capture.origins import is_fx_leaf
from torchq_compat.custom_modules import handler_of
from torchq_compat.model.graph_module import QuantizationGraphModule, record_of
from torchq_compat.model.quantized_interface import quantized_values, result_details
from torchq_compat.quantize.first_call import WaitingModel
from torchq_compat.support.argument_checks import checked_arguments, instance_of
from torchq_compat.support.decisions import (
    MODULE_DECISIONS,
    NOT_PREPARED,
    Action,
    Decision,
    QuantizedValue,
    Report,
)
from torchq_compat.support.dtypes import dtype_name
from torchq_compat.support.graph_nodes import module_path_of, source_of
from torchq_compat.support.report import ObservedRange


@checked_arguments(model=instance_of(nn.Module, what="an nn.Module"))
def explain(model: nn.Module) -> Report:
    """Report what is quantized in ``model`` and what is not, and why.

    Args:
        model: a float, prepared or converted model.

    Returns:
        A report that prints as a table, also in a notebook. Iterating over it yields the decisions;
        ``report.rows`` and ``report.to_pandas()`` also have a row for every weight and quantized input;
        ``report.to_dict()`` and ``report.to_json()`` are for machines. Of a calibrated model
        ``report.plot()`` shows the ranges.

    Example:
        >>> import torch
        >>> from torch.ao.quantization import get_default_qconfig_mapping
        >>> from torchq_compat import explain, prepare_fx
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(4, 2)).eval(), torch.randn(3, 4)
        >>> prepared = prepare_fx(model, get_default_qconfig_mapping("x86"), (x,))
        >>> explain(prepared).find("0")[0].action.value
        'quantized'
    """
    if isinstance(model, WaitingModel):
        model._refuse("explain")
    record = record_of(model)
    if record is None or not isinstance(model, QuantizationGraphModule):
        about_modules = vars(model).get(MODULE_DECISIONS) or tuple(_of_float_model(model))
        modules = dict(model.named_modules())
        return Report(
            tuple(
                itertools.chain(
                    *([about_module, *_inside(modules, about_module)] for about_module in about_modules)
                )
            )
        )
    lowering, model = model.lowering, model.reference
    nodes = {node.name: node for node in model.graph.nodes}
    last = {nodes[element.node] for element in record.decisions if element.node in nodes}
    quantized = {
        nodes[member.node]
        for member in record.decisions
        if member.node in nodes and member.action is not Action.FLOAT
    }
    on_integers = {entry.node for entry in lowering if entry.action is Action.LOWERED and entry.node}
    places = _Places(model)
    placed: list[tuple[int, list[Decision]]] = []
    before = 0
    own = {item.path: item for item in record.decisions if item.action is Action.FOLDED}
    folded = _folded(model, record.batch_norms, own)
    modules = dict(model.named_modules())
    for decision in record.decisions:
        if decision.action is Action.FOLDED:
            continue
        if decision.action is Action.FLOAT and decision.node in on_integers:
            continue  # The lowering's decision says what runs, and that the configuration left the op float.
        # A quantize behind a float op belongs to a consumer, and says nothing about the op.
        node = None if decision.action is Action.FLOAT else nodes.get(decision.node)
        values: tuple[QuantizedValue, ...] = ()
        if decision.action in (Action.QUANTIZED, Action.SHARED):
            ends = [node] if node else places.calls(decision.path)
            result = (quantized_values(model, end, decision.path, last - {end}, quantized) for end in ends)
            values = tuple(dict.fromkeys(itertools.chain(*result)))
        decision = replace(decision, details=result_details(node), values=values)
        place = places.of(decision)
        if place >= places.behind and decision.node:
            # The node of this op was replaced: place the op behind the op of the previous decision.
            place = before
        before = place if decision.node else before
        placed.append((place, [decision, *folded.pop(decision.path, ()), *_inside(modules, decision)]))
    placed.extend((places.of(decision), [decision]) for decision in itertools.chain(*folded.values()))
    in_order = sorted(placed, key=lambda pair: pair[0])
    decisions = itertools.chain(*(decisions for _, decisions in in_order))
    return Report((*decisions, *lowering), tuple(_ranges(model)))


class _Places:
    """The places of decisions in the graph, as sort keys in the order of the model."""

    def __init__(self, model: GraphModule) -> None:
        self._by_name: dict[str, int] = {}
        self._by_path: dict[str, int] = {}
        self._calls: dict[str, list[Node]] = {}
        for index, node in enumerate(model.graph.nodes):
            if node.op == "get_attr":
                continue
            self._by_name[node.name] = index
            if node.op == "call_module":
                self._calls.setdefault(str(node.target), []).append(node)
            self._by_path.setdefault(module_path_of(node), index)
        self.behind = len(self._by_name) + len(model.graph.nodes)

    def calls(self, path: str) -> list[Node]:
        """Return the calls of the module at ``path``."""
        return self._calls.get(path, [])

    def of(self, decision: Decision) -> int:
        """Return the sort key of ``decision``; decisions about nothing in the graph come last, and those
        about sizes at the very end."""
        if decision.action in (Action.FREE, Action.FIXED):
            return self.behind + 1
        calls = self.calls(decision.path)
        if decision.node in self._by_name:
            return self._by_name[decision.node]
        if calls:
            return self._by_name[calls[0].name]
        if not decision.path:
            return self.behind
        # The path of a function is the name of its node.
        return self._by_path.get(decision.path, self._by_name.get(decision.path, self.behind))


def _folded(
    model: GraphModule, before: Mapping[str, str], own: Mapping[str, Decision]
) -> dict[str, list[Decision]]:
    """Return the decisions about batch norms that left the graph, by the path of the op before them; ``own``
    are those of prepare. Behind a folded batch norm its path may have an activation."""
    left = {module_path_of(node) for node in model.graph.nodes}
    matches: dict[str, list[Decision]] = {}
    for path, producer in before.items():
        if path not in left or path in own:
            reason = f"it is in the weight of {producer}" if producer else "it is in the weight it follows"
            decision = own.get(path) or Decision(path, "BatchNorm", Action.FOLDED, reason)
            matches.setdefault(producer, []).append(decision)
    return matches


def _of_float_model(model: nn.Module) -> Iterator[Decision]:
    for path, module in model.named_modules():
        if path and is_fx_leaf(module) and not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            yield Decision(path, type(module).__name__, Action.FLOAT, NOT_PREPARED)


def _inside(modules: Mapping[str, nn.Module], decision: Decision) -> Iterator[Decision]:
    if decision.node or decision.action is Action.FLOAT:
        return
    opaque = modules.get(decision.path)
    handler = handler_of(opaque)
    if handler is not None and isinstance(opaque, OpaqueModule):
        yield from handler.explain(opaque, decision.path, explain)


def _ranges(model: nn.Module) -> Iterator[ObservedRange]:
    """Yield what the observers per tensor in ``model`` and in the cells inside have seen."""
    graphs = ((path, graph) for path, graph in model.named_modules() if isinstance(graph, GraphModule))
    for path, graph in graphs:
        for node, module in observer_nodes(graph):
            observer: Any = getattr(module, "activation_post_process", module)  # of a fake-quantize
            least, largest = getattr(observer, "min_val", None), getattr(observer, "max_val", None)
            if least is None or largest is None or least.numel() != 1 or not bool(least <= largest):
                continue  # Fixed qparams, channels, or no data yet.
            scale, zero_point = (float(value) for value in observer.calculate_qparams())
            first, last = ((value - zero_point) * scale for value in (observer.quant_min, observer.quant_max))
            source = source_of(node)
            place = ".".join(filter(None, (path, module_path_of(source) or source.name)))
            dtype = dtype_name(observer.dtype)
            clipped = _clipped(observer, first, last)
            yield ObservedRange(place, dtype, float(least), float(largest), first, last, clipped)


def _clipped(observer: Any, first: float, last: float) -> float | None:
    """Return the share of a histogram's counts beyond ``first`` and ``last``; None without a histogram."""
    counts = getattr(observer, "histogram", None)
    if counts is None:
        return None
    least, largest = float(observer.min_val), float(observer.max_val)
    centers = least + (torch.arange(len(counts)) + 0.5) * (largest - least) / len(counts)
    beyond = (centers < first) | (centers > last)
    return float(counts[beyond].sum() / counts.sum())
