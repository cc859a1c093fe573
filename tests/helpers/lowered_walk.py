"""What each op of a lowered graph really runs on, integers or floats, found by running the graph."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.fx import Interpreter, Node

import torchq_compat as tc

__all__ = ["check_explained", "ran"]

#: Ops that the lowering itself adds between the ops of the user's model.
HOUSEKEEPING = (
    "torchq_compat_native.quantize.default",
    "torchq_compat_native.dequantize.default",
    "aten.contiguous.default",
    "aten.sym_",
    "quantized_decomposed.",
    "<built-in function",
)
INTEGERS = (torch.uint8, torch.int8)


class _Walk(Interpreter):
    def __init__(self, lowered: Any) -> None:
        super().__init__(lowered, graph=lowered.graph)
        self.ran: dict[str, str] = {}
        self.reference_names = {
            node.name for node in lowered.reference.graph.nodes if node.target is not operator.getitem
        }

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        is_of_user = not n.name.startswith("quantize_per_tensor")  # A quantize may become a table.
        if n.op == "call_function" and is_of_user and not str(n.target).startswith(HOUSEKEEPING):
            values = pytree.tree_leaves([*(self.env[each] for each in n.all_input_nodes), result])
            if any(isinstance(each, Tensor) and each.dtype in INTEGERS for each in values):
                self.ran[_stands_for(n, self.reference_names)] = "integers"
            elif n.name in self.reference_names:
                self.ran.setdefault(n.name, "floats")
        return result


def _stands_for(call: Node, reference_names: set[str]) -> str:
    """The op of the reference graph whose result ``call`` computes."""
    while call.name not in reference_names:
        call = next(iter(call.users))
    return call.name


def ran(lowered: Any, *args: Any) -> dict[str, str]:
    """Return "integers" or "floats" for each op, by its name."""
    walk = _Walk(lowered)
    with torch.no_grad():
        walk.run(*args)
    return walk.ran


def _is_quantized(node: Node) -> bool:
    """Return whether the reference graph has q-dq in front of ``node`` and behind it."""
    read = [str(source.target) for source in node.all_input_nodes]
    return any("dequantize" in target for target in read) and any(
        "quantize_per_tensor" in str(user.target) for user in node.users
    )


def check_explained(lowered: Any, *args: Any) -> dict[str, str]:
    """Assert that ``explain`` is right about every op that ran; return what ran."""
    found = ran(lowered, *args)
    report = tc.explain(lowered)
    by_action: dict[str, set[str]] = {}
    for decision in report:
        if decision.node:
            by_action.setdefault(decision.action.value, set()).add(decision.node)
    nowhere = ("runs in the kernel of the op before it", "does nothing in evaluation")
    fused = {d.node for d in report if d.reason in nowhere}
    said_integers = by_action.get("lowered", set()) - fused
    said_floats = by_action.get("reference", set()) | by_action.get("float", set())
    assert {name for name, form in found.items() if form == "integers"} == said_integers
    assert not fused & set(found)
    assert not said_integers & said_floats
    in_floats = {name for name, form in found.items() if form == "floats"}
    quantized = {node.name for node in lowered.reference.graph.nodes if _is_quantized(node)}
    assert in_floats & quantized <= said_floats, in_floats & quantized - said_floats
    assert said_floats & set(found) <= in_floats
    return found
