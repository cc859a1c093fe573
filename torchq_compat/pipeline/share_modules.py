"""Custom modules between a custom config and a user's Quantizer: which of them are the Quantizer's.

What a custom config maps is this package's. A module that nothing maps, and that would be a float call in the
graph, is the Quantizer's if it annotates the ops that the module is made of: it is asked, on a copy.
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
    """Return what writes the modules that ``quantizer`` wants as ops, by path, and ``decisions`` as they are
    then."""
    candidates = {} if quantizer is None else _candidates(captured, swaps)
    if quantizer is None or not candidates:
        return {}, list(decisions)
    wanted, why_not = _wanted(captured, modules, candidates, quantizer)
    kept = []
    for decision in decisions:
        if decision.path in wanted:
            continue  # The Quantizer's decision stands in the graph.
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
    """Return the paths of the candidates whose ops ``quantizer`` annotates, and why it leaves the others."""
    name = type(quantizer).__name__
    trial = copy.deepcopy(captured.found.graph_module)
    insert_calls(trial, captured.stubs, modules, candidates)
    written = _module_paths(trial) & candidates.keys()
    try:
        asked = _own_copy(quantizer)
        trial = asked.transform_for_annotation(trial)
        asked.annotate(trial)
    except TorchQCompatError:
        raise  # About what it writes, which is to be put right.
    except Exception as cause:
        # It may do without the ops it stumbles over; if not, the same error comes again, on the graph itself.
        first_line = str(cause).strip().split("\n", 1)[0]
        return set(), f"{name} fails on its ops: {type(cause).__name__}: {first_line}"
    # What nothing reads any more, the Quantizer has rewritten as ops of its own.
    annotated, read = (_module_paths(trial, accepts) for accepts in (_is_annotated, _is_read))
    wanted = (written & annotated) | (written - read)
    return wanted, f"{name} does not annotate its ops either"


def _is_annotated(node: Node) -> bool:
    """Return whether ``node`` is annotated, at an input or at one of its outputs."""
    return bool(annotated_points(node)) or any(annotated_points(user) for user in node.users)


def _is_read(node: Node) -> bool:
    """Return whether an output of ``node`` is used. A recurrent operator that nobody reads stays in the
    graph, because it may draw random numbers."""
    return any(user.users for user in node.users)


def _module_paths(graph_module: GraphModule, accepts: Callable[[Node], bool] = lambda node: True) -> set[str]:
    """Return the paths of the modules whose ops have several outputs and are accepted."""
    return {
        module_path_of(node).partition("@")[0]
        for node in graph_module.graph.nodes
        if node.op == "call_function" and has_several(node) and accepts(node)
    }


def _own_copy(quantizer: Quantizer) -> Quantizer:
    """Copy the Quantizer, so that it remembers nothing of the graph it is tried on."""
    try:
        copied: Quantizer = copy.deepcopy(quantizer)
    except Exception:
        return quantizer
    return copied
