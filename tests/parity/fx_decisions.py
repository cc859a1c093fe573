"""The decisions of FX and of this package on each op of a model, in the same form.

An op is named by its place: a module by its path, a function by the path of the module that calls it and its
name. A fused chain is named by its first op.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.ao.quantization.observer import _is_activation_post_process
from torch.fx import GraphModule, Node

import torchq_compat as tc
from torchq_compat.comparison.fx_side import SYNONYMS

__all__ = ["quantized_by_fx", "quantized_by_us"]

#: FX counts accesses to sizes and to elements of lists as ops. They compute nothing; torch.export drops
#: ``contiguous`` on contiguous tensors.
NO_OPS = {"getitem", "getattr", "size", "dim", "shape", "contiguous"}


def quantized_by_us(prepared: GraphModule) -> Counter[tuple[str, str]]:
    """Return (path, function name or "" for a module) of ops that ``explain`` calls quantized or shared."""
    found: Counter[tuple[str, str]] = Counter()
    for decision in tc.explain(prepared):
        if decision.node and decision.action in ("quantized", "shared"):
            if "." in decision.kind.split(" + ")[0]:
                scope = decision.path.rpartition("/")[0]
                name = _name(decision.kind.split(" + ")[0].split(".")[0])
                found[scope, name] += name not in NO_OPS
            else:
                found[decision.path, ""] += 1
    return +found


def quantized_by_fx(prepared: GraphModule) -> Counter[tuple[str, str]]:
    """Return the same for a model that FX prepared, read from its graph."""
    modules = dict(prepared.named_modules(remove_duplicate=False))
    scopes = prepared.meta["_observed_graph_module_attrs"].node_name_to_scope
    observers = {
        node for node in prepared.graph.nodes if node.op == "call_module" and _is_observer(modules, node)
    }
    found: Counter[tuple[str, str]] = Counter()
    for node in prepared.graph.nodes:
        is_op = node.op in ("call_module", "call_function", "call_method") and node not in observers
        if not is_op or not _is_quantized(node, observers):
            continue
        root = _root_of_chain(node, observers)
        is_module = root.op == "call_module"
        name = "" if is_module else _name(_function_name(root))
        if name not in NO_OPS:
            found[str(root.target) if is_module else scopes[root.name][0], name] += 1
    return +found


def _is_quantized(node: Node, observers: set[Node]) -> bool:
    info = node.meta["target_dtype_info"]
    output, weight = (_observer(info.get(f"{what}_obs_or_fq_ctr")) for what in ("output_act", "weight"))
    if output is None:
        return False
    if getattr(output, "is_dynamic", False):
        return any(arg in observers for arg in node.all_input_nodes)
    if output.dtype is not torch.float32:
        return any(user in observers for user in node.users)
    return weight is not None and weight.dtype not in (torch.float32, None)


def _root_of_chain(node: Node, observers: set[Node]) -> Node:
    """Follow a fused function chain like add + relu, which has no observers inside, up to its first op."""
    (first, *_) = node.all_input_nodes or [None]
    info = first.meta.get("target_dtype_info") if first is not None else None
    inside = (
        first is not None
        and first not in observers
        and first.op in ("call_function", "call_module")
        and _observer(node.meta["target_dtype_info"].get("output_act_obs_or_fq_ctr")) is not None
        and info is not None
        and (given := _observer(info.get("output_act_obs_or_fq_ctr"))) is not None
        and given.dtype is not torch.float32
        and not getattr(given, "is_dynamic", False)
        and len(first.users) == 1
    )
    return _root_of_chain(first, observers) if inside and first is not None else node


def _observer(constructor: Any) -> Any:
    return constructor() if constructor else None


def _is_observer(modules: dict[str, Any], node: Node) -> bool:
    return bool(_is_activation_post_process(modules[str(node.target)]))


def _function_name(node: Node) -> str:
    return node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", node.target))


def _name(name: str) -> str:
    return SYNONYMS.get(name, name)
