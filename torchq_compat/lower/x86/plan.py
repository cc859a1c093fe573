"""Plan a lowering: choose the kernel for each op of the reference graph."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from torchq_compat.annotate.passthrough_ops import PASSTHROUGH, preserves_values
from torchq_compat.lower.x86.engines import Engine, decide_engine, packing_for
from torchq_compat.lower.x86.kernels import FAMILIES
from torchq_compat.lower.x86.kernels.followed import followed_by
from torchq_compat.lower.x86.kernels.kernel_base import KernelCall, Refusal, Rule, Site
from torchq_compat.lower.x86.qdq_operands import (
    SIZE_OPS,
    has_kernels,
    is_integers,
    tensor_inputs,
)
from torchq_compat.lower.x86.trials import MOST_STEPS, Outcome, Trials
from torchq_compat.qspecs.qdq import ALL_OPS, DEQUANTIZE, DEQUANTIZES, QUANTIZE, is_dequantize
from torchq_compat.qspecs.qparams import PerTensorQParams
from torchq_compat.support.decisions import FUSED, Action, Decision
from torchq_compat.support.graph_nodes import module_path_of

__all__ = ["Plan", "plan_graph"]

ATEN = torch.ops.aten
FBGEMM = Engine("fbgemm")
#: Ops that compute nothing that a user wrote.
NO_OPS = (*ALL_OPS, operator.getitem, *SIZE_OPS)
FIRST = tuple(family for family in FAMILIES if family.goes_first)
RULES: dict[Any, Rule] = {
    op: rule for family in FAMILIES if not family.goes_first for op, rule in family.rules.items()
}
ASKED_ALWAYS = frozenset(op for family in FAMILIES if family.is_asked_always for op in family.rules)


@dataclass(frozen=True)
class Plan:
    """The kernels chosen for the nodes of a reference graph.

    Attributes:
        kernels: node -> the kernel call that computes its value.
        qparams_of: node -> the qparams of its values, if the kernels support them.
        carried: ops that run unchanged, on quantized tensors.
        decisions: one for every op, for ``explain``.
        runs_here: whether the graph's state is on a device and in a dtype of the kernels.
    """

    kernels: dict[Node, KernelCall] = field(default_factory=dict)
    qparams_of: dict[Node, PerTensorQParams] = field(default_factory=dict)
    carried: frozenset[Node] = frozenset()
    decisions: tuple[Decision, ...] = ()
    runs_here: bool = True

    def covered(self) -> set[Node]:
        """Return the nodes that kernels compute along with another node."""
        return {node for call in self.kernels.values() for node in call.covers} - set(self.kernels)


def plan_graph(
    graph_module: GraphModule,
    input_qparams: Mapping[str, PerTensorQParams] | None = None,
    left_float: Mapping[str, str] | None = None,
    trials: Trials | None = None,
) -> Plan:
    """Choose the kernel of every op of ``graph_module``, a q-dq graph.

    Args:
        input_qparams: name of an input -> the qparams on which its floats lie.
        left_float: name of an op -> why the configuration leaves it float.
        trials: the trials that were run before.
    """
    elsewhere = _devices(graph_module) - {"cpu"}
    if elsewhere:
        reason = f"its state is on {', '.join(sorted(elsewhere))}; the kernels run on the CPU"
        return Plan(decisions=(Decision("", "convert_fx", Action.REFERENCE, reason),), runs_here=False)
    others = _float_dtypes(graph_module) - {torch.float32}
    if others:
        reason = f"it computes in {', '.join(sorted(map(str, others)))}; the kernels take torch.float32"
        return Plan(decisions=(Decision("", "convert_fx", Action.REFERENCE, reason),), runs_here=False)
    engine = decide_engine()
    qparams_of = _known_inputs(graph_module, input_qparams or {}) if engine.has_kernels else {}
    planner = _Planner(graph_module, qparams_of, left_float or {}, trials or Trials(), engine)
    for node in graph_module.graph.nodes:
        planner.plan(node)
    return Plan(planner.kernels, qparams_of, frozenset(planner.carried), tuple(planner.decisions()))


@dataclass
class _Planner:
    """Chooses kernels node by node, and holds the decisions so far; see ``Plan``."""

    graph_module: GraphModule
    qparams_of: dict[Node, PerTensorQParams]
    left_float: Mapping[str, str]
    trials: Trials
    engine: Engine
    kernels: dict[Node, KernelCall] = field(default_factory=dict)
    carried: set[Node] = field(default_factory=set)
    refusals: dict[Node, Refusal] = field(default_factory=dict)

    def plan(self, node: Node) -> None:
        qparams = _qparams_of(node, self.qparams_of) if self.engine.has_kernels else None
        if qparams is not None:
            self.qparams_of[node] = qparams
        if node.op != "call_function":
            return
        if qparams is not None and preserves_values(node):
            self.carried.add(node)
        elif node.name not in self.left_float and node.target not in NO_OPS:
            self._plan_op(node)

    def _plan_op(self, op: Node) -> None:
        result, answer = self._ask(op)
        alone = self._covers_floats(answer)
        if alone:
            result, answer = self._ask(op, alone=True)
            if not isinstance(answer, KernelCall) or self._covers_floats(answer):
                return  # For ops fused in the backend config, the decision names the last op.
        if isinstance(answer, KernelCall):
            answer = self._tried(op, result, answer, alone=alone)
        if isinstance(answer, KernelCall):
            self.kernels[result] = answer
        elif _is_quantized(op, self.qparams_of):
            why_not = self.engine.why_not or _without_kernel(op)
            self.refusals[op] = answer or Refusal(why_not)

    def _ask(self, op: Node, *, alone: bool = False) -> tuple[Node, KernelCall | Refusal | None]:
        return _ask(self.graph_module, op, self.qparams_of, self.engine, alone=alone)

    def _covers_floats(self, answer: KernelCall | Refusal | None) -> bool:
        """Return whether a kernel computes what the configuration leaves float."""
        if not isinstance(answer, KernelCall):
            return False
        return any(node.name in self.left_float for node in answer.covers)

    def _tried(self, op: Node, result: Node, call: KernelCall, *, alone: bool) -> KernelCall | Refusal:
        """Return ``call``, the same packed for fbgemm, or a refusal: no kernel is better than a wrong one."""
        verdict = self._verdict(result, call)
        is_other = self.engine.has_kernels and torch.backends.quantized.engine != FBGEMM.name
        if not isinstance(verdict, Refusal) or not is_other or not _has_engine(FBGEMM):
            return verdict
        with packing_for(FBGEMM):
            result_again, again = self._ask(op, alone=alone)
            if isinstance(again, KernelCall) and result_again is result:
                other = self._verdict(result, again)
                if isinstance(other, KernelCall):
                    notes = (other.note, f"packed for fbgemm: for the engine in use {verdict.reason}")
                    return replace(other, note=", ".join(filter(None, notes)))
        return replace(verdict, reason=f"{verdict.reason}; packed for fbgemm too")

    def _verdict(self, result: Node, call: KernelCall) -> KernelCall | Refusal:
        outcome = self._outcome(result, call)
        if outcome.steps <= MOST_STEPS:
            return call
        within = self._outcome(result, call, only_observed=True)
        if within.steps <= MOST_STEPS:
            note = f"within the observed range; beyond it the kernel {outcome.fault}, as in FX"
            return replace(call, note=note)
        fault = f"{call.label} {within.fault} on this CPU, on values that fill its qparams"
        return Refusal(fault, warn=True)

    def _outcome(self, result: Node, call: KernelCall, *, only_observed: bool = False) -> Outcome:
        tried = self.trials.outcome
        return tried(self.graph_module, self.qparams_of, result, call, only_observed=only_observed)

    def decisions(self) -> Iterator[Decision]:
        """Yield the decision about every op, in graph order."""
        by_op = {call.covers[0]: call for call in self.kernels.values()}
        covered = {node for call in self.kernels.values() for node in call.covers}
        for node in self.graph_module.graph.nodes:
            if node in by_op:
                call = by_op[node]
                reason = f"runs as {call.label}" + (f", {call.note}" if call.note else "")
                yield _decision(node, Action.LOWERED, reason)
            elif node in covered:
                yield _decision(node, Action.LOWERED, FUSED)
            elif node in self.carried and node.target not in NO_OPS:
                yield _decision(node, Action.LOWERED, self._why_carried(node))
            elif node in self.refusals:
                refusal = self.refusals[node]
                reason = f"runs in floats between its q-dq: {refusal.reason}"
                yield _decision(node, Action.REFERENCE, reason, warn=refusal.warn)

    def _why_carried(self, node: Node) -> str:
        why_float = self.left_float.get(node.name)
        if why_float is None:
            return "runs on the integers as it is"
        return f"runs on the integers as it is, with the values it has in floats; it has no q-dq: {why_float}"


def _known_inputs(
    graph_module: GraphModule, by_name: Mapping[str, PerTensorQParams]
) -> dict[Node, PerTensorQParams]:
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    named = {node: by_name[str(node.target)] for node in placeholders if str(node.target) in by_name}
    return {node: qparams for node, qparams in named.items() if has_kernels(qparams)}


def _devices(graph_module: GraphModule) -> set[str]:
    return {str(tensor.device) for tensor in (*graph_module.parameters(), *graph_module.buffers())}


def _float_dtypes(graph_module: GraphModule) -> set[torch.dtype]:
    """Return the float dtypes of the inputs and of the dequantized values."""
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    values = [node.meta.get("val") for node in placeholders]
    given = {value.dtype for value in values if isinstance(value, torch.Tensor)}
    found = {node.kwargs.get("out_dtype") for node in graph_module.graph.nodes if node.target in DEQUANTIZES}
    return {dtype for dtype in given | found if isinstance(dtype, torch.dtype) and dtype.is_floating_point}


def _qparams_of(node: Node, qparams_of: dict[Node, PerTensorQParams]) -> PerTensorQParams | None:
    """Return the qparams of the values at ``node``, if the kernels support them."""
    if node.target is DEQUANTIZE:
        source, qparams = node.args[0], PerTensorQParams.of_node(node)
        assert isinstance(source, Node)
        is_plain = not node.kwargs and is_integers(source) and qparams_of.get(source, qparams) == qparams
        return qparams if is_plain and has_kernels(qparams) else None
    if node.target is QUANTIZE:
        qparams = PerTensorQParams.of_node(node)
        return qparams if has_kernels(qparams) else None
    if preserves_values(node):
        found = {qparams_of.get(source) for source in tensor_inputs(node)}
        return found.pop() if len(found) == 1 else None
    return None


def _has_engine(engine: Engine) -> bool:
    return engine.name in torch.backends.quantized.supported_engines


def _ask(
    graph_module: GraphModule,
    op: Node,
    qparams_of: dict[Node, PerTensorQParams],
    engine: Engine,
    *,
    alone: bool = False,
) -> tuple[Node, KernelCall | Refusal | None]:
    """Return (the node whose value a kernel would compute, the answer of the rules) for ``op``, ``alone`` or
    along with the activation that reads it."""
    follower = None if alone else followed_by(op)
    relu = None if alone else _only_reader(follower or op, ATEN.relu.default)
    last = relu or follower or op
    quantize = _only_reader(last, QUANTIZE)
    qparams = None
    if quantize is not None and engine.has_kernels:
        qparams = _qparams_of(quantize, qparams_of)
    site = Site(graph_module, op, relu, qparams, qparams_of.get, follower)
    answer = _answer(site, engine)
    if isinstance(answer, KernelCall) and answer.returns_floats:
        return answer.stands_for or last, answer
    return quantize or last, answer


def _answer(site: Site, engine: Engine) -> KernelCall | Refusal | None:
    for family in FIRST:
        if family.is_of_engine and not engine.has_kernels:
            continue
        rule = family.rules.get(site.op.target)
        answer = rule(site) if rule is not None else None
        if answer is not None:
            return answer
    if not engine.has_kernels:
        return None
    is_asked = site.qparams is not None or site.op.target in ASKED_ALWAYS
    return RULES[site.op.target](site) if is_asked and site.op.target in RULES else None


def _only_reader(node: Node, target: Any) -> Node | None:
    """Return the one node that reads ``node``, if it calls ``target``."""
    reader = next(iter(node.users), None)
    return reader if reader is not None and len(node.users) == 1 and reader.target is target else None


def _is_quantized(op: Node, qparams_of: Mapping[Node, PerTensorQParams]) -> bool:
    """Return whether the reference graph quantizes an input or the result of ``op``."""
    if any(is_dequantize(source) or source in qparams_of for source in op.all_input_nodes):
        return True
    return any(user.target is QUANTIZE for user in op.users)


def _without_kernel(op: Node) -> str:
    if op.target in PASSTHROUGH and len(op.all_input_nodes) > 1:
        return "its inputs have different qparams"
    if op.target in RULES or op.target in PASSTHROUGH:
        return "its input or its result is not quantized"
    return "it has no integer kernel here"


def _decision(node: Node, action: Action, reason: str, *, warn: bool = False) -> Decision:
    path = module_path_of(node)
    place = f"{path}/{node.name}" if path else node.name
    return Decision(place, str(node.target), action, reason, node=node.name, warn=warn)
