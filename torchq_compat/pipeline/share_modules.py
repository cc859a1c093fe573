"""Which custom modules a user's Quantizer quantizes, and which this package does.

This package quantizes the modules that a custom config maps. A module that nothing maps, which would be a
float call in the graph, is left to the Quantizer if the Quantizer annotates the module's ops; a trial on a
copy of the graph shows whether it does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import nn
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.quantizer import Quantizer

from torchq_compat.annotate.carried_out import annotated_points
from torchq_compat.custom_modules.registry import WriteOps
from torchq_compat.custom_modules.swap import Swap
from torchq_compat.errors import TorchQCompatError
from torchq_compat.multi_output.edges_and_nodes import has_several
from torchq_compat.opaque_calls.insert_calls import insert_calls
from torchq_compat.pipeline.capture_model import CapturedModel
from torchq_compat.support.decisions import Action, Decision
from torchq_compat.support.graph_nodes import module_path_of

__all__ = ["share_modules"]


def share_modules(
    captured: CapturedModel,
    swaps: Sequence[Swap],
    modules: dict[str, nn.Module],
    decisions: Sequence[Decision],
    quantizer: Quantizer | None,
) -> tuple[Mapping[str, WriteOps], list[Decision]]:
    """Return the writers, by path, of the modules that ``quantizer`` annotates as ops, and the ``decisions``
    that remain."""
    candidates = {} if quantizer is None else _candidates(captured, swaps)
    if quantizer is None or not candidates:
        return {}, list(decisions)
    wanted, why_not = _wanted(captured, modules, candidates, quantizer)
    kept = []
    for decision in decisions:
        if decision.path in wanted:
            continue  # The graph has the Quantizer's decision.
        if decision.path in candidates and decision.action is Action.FLOAT:
            decision = replace(decision, reason=f"{decision.reason}; {why_not}")
        kept.append(decision)
    return {path: candidates[path] for path in wanted}, kept


def _candidates(captured: CapturedModel, swaps: Sequence[Swap]) -> dict[str, WriteOps]:
    found = {}
    for swap in swaps:
        write = None if swap.request is not None else swap.handler.ops_writer(swap.module)
        if write is not None and captured.stubs.layouts(swap.paths[0]):
            found[swap.paths[0]] = write
    return found


def _wanted(
    captured: CapturedModel,
    modules: dict[str, nn.Module],
    candidates: Mapping[str, WriteOps],
    quantizer: Quantizer,
) -> tuple[set[str], str]:
    """Return the paths of the candidates whose ops ``quantizer`` annotates, and why the others stay float."""
    name = type(quantizer).__name__
    trial = copy.deepcopy(captured.found.graph_module)
    insert_calls(trial, captured.stubs, modules, candidates)
    written = _module_paths(trial) & candidates.keys()
    try:
        asked = _own_copy(quantizer)
        trial = asked.transform_for_annotation(trial)
        asked.annotate(trial)
    except TorchQCompatError:
        raise  # It reports a faulty annotation, which the Quantizer's author has to correct.
    except Exception as cause:
        # Without the written ops the Quantizer may succeed; if not, it raises the same error on the graph.
        first_line = str(cause).strip().split("\n", 1)[0]
        return set(), f"{name} fails on its ops: {type(cause).__name__}: {first_line}"
    # An op whose results are no longer read was rewritten by the Quantizer as ops of its own.
    annotated, read = (_module_paths(trial, accepts) for accepts in (_is_annotated, _is_read))
    wanted = (written & annotated) | (written - read)
    return wanted, f"{name} does not annotate its ops either"


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


def _own_copy(quantizer: Quantizer) -> Quantizer:
    """Return a copy of ``quantizer``, so that it remembers nothing of the trial graph, or ``quantizer``
    itself if it cannot be copied."""
    try:
        copied: Quantizer = copy.deepcopy(quantizer)
    except Exception:
        return quantizer
    return copied
