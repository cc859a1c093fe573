"""The measures of the tests: SQNR, quantization steps, and live FX as the oracle."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Container, Sequence
from typing import Any

import torch
import torch.ao.quantization.quantize_fx as fx
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.ao.quantization.fx.custom_config import ConvertCustomConfig, PrepareCustomConfig
from torch.fx import GraphModule

import torchq_compat as tc
from tests.helpers.engines import with_exact_sums
from tests.helpers.histograms import searched_in_arrays
from torchq_compat.support.decisions import Action, Decision

__all__ = [
    "CONVERT_LSTM",
    "MAP_LSTM",
    "activation_qparams",
    "by_fx",
    "by_us",
    "calibrate",
    "count_nodes",
    "fx_activation_qparams",
    "leaves",
    "nodes_of_each_result",
    "op_decisions",
    "quantize_nodes",
    "sqnr",
]

MAP_LSTM = PrepareCustomConfig().set_float_to_observed_mapping(nn.LSTM, torch.ao.nn.quantizable.LSTM)
CONVERT_LSTM = ConvertCustomConfig().set_observed_to_quantized_mapping(
    torch.ao.nn.quantizable.LSTM, torch.ao.nn.quantized.LSTM
)


def sqnr(reference: Tensor, value: Tensor) -> float:
    """Return the signal to quantization noise ratio of ``value`` in dB; infinite if bit-equal."""
    noise = (reference.double() - value.double()).pow(2).sum()
    signal = reference.double().pow(2).sum()
    return float(10 * torch.log10(signal / noise)) if noise > 0 else float("inf")


def leaves(result: Any) -> list[Tensor]:
    """Return the tensors of a nested result."""
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


def calibrate(prepared: nn.Module, batches: Sequence[tuple[Any, ...]]) -> None:
    with torch.no_grad():
        for batch in batches:
            prepared(*batch)


def by_us(
    model: nn.Module,
    mapping: Any,
    batches: Sequence[tuple[Any, ...]],
    prepare_config: Any = None,
    **kwargs: Any,
) -> tuple[GraphModule, GraphModule]:
    """Return (prepared, converted) by this package."""
    prepared = tc.prepare_fx(model, mapping, batches[0], prepare_config, **kwargs)
    calibrate(prepared, batches)
    return prepared, tc.convert_to_reference_fx(prepared)


def by_fx(
    model: nn.Module,
    mapping: Any,
    batches: Sequence[tuple[Any, ...]],
    prepare_config: Any = None,
    **kwargs: Any,
) -> tuple[GraphModule, GraphModule]:
    """Return (prepared, converted) by FX, on a copy: FX marks and shares the model that it is given."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = fx.prepare_fx(copy.deepcopy(model), mapping, batches[0], prepare_config, **kwargs)
        calibrate(prepared, batches)
        config = CONVERT_LSTM if prepare_config is not None else None
        with searched_in_arrays():
            reference = fx.convert_to_reference_fx(copy.deepcopy(prepared), config)
    return prepared, with_exact_sums(reference)


def quantize_nodes(graph_module: GraphModule) -> list[torch.fx.Node]:
    """Return the quantize nodes of our converted graph, or of the reference graph of a lowered one."""
    reference = getattr(graph_module, "reference", graph_module)
    return [n for n in reference.graph.nodes if str(n.target).startswith("quantized_decomposed.quantize_per")]


def count_nodes(graph_module: GraphModule) -> int:
    """Return the nodes of the graph and of every graph module inside it."""
    return sum(len(m.graph.nodes) for m in graph_module.modules() if isinstance(m, GraphModule))


def op_decisions(model: nn.Module) -> list[Decision]:
    """Return the decisions in ``explain`` on modules and ops, without those on the sizes of inputs."""
    return [d for d in tc.explain(model) if d.action not in (Action.FREE, Action.FIXED)]


def nodes_of_each_result(graph_module: GraphModule) -> list[set[torch.fx.Node]]:
    """Return, for each result of ``graph_module``, the nodes that it is computed of."""
    results = graph_module.graph.output_node().all_input_nodes
    found = []
    for result in results:
        nodes, left = set(), [result]
        while left:
            node = left.pop()
            if node not in nodes:
                nodes.add(node)
                left += node.all_input_nodes
        found.append(nodes)
    return found


def activation_qparams(
    graph_module: GraphModule, among: Container[torch.fx.Node] | None = None
) -> set[tuple[float, int]]:
    """Return the distinct (scale, zero point) of the activations of our converted outer graph."""
    return {
        (round(float(n.args[1]), 9), int(n.args[2]))
        for n in quantize_nodes(graph_module)
        if n.target is torch.ops.quantized_decomposed.quantize_per_tensor.default
        and (among is None or n in among)
    }


def fx_activation_qparams(
    graph_module: GraphModule, among: Container[torch.fx.Node] | None = None
) -> set[tuple[float, int]]:
    """Return the same for FX's reference graph, where qparams are buffers."""
    found = set()
    for node in graph_module.graph.nodes:
        if among is not None and node not in among:
            continue
        # The weight of a functional is quantized in the graph, too.
        if node.target is torch.quantize_per_tensor and node.args[0].op != "get_attr":
            scale, zero_point = (getattr(graph_module, str(arg.target)) for arg in node.args[1:3])
            found.add((round(float(scale), 9), int(zero_point)))
    return found
