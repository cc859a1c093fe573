"""Rewrite a q-dq graph to one on plain integers.

The nodes are visited in order. A kernel takes the place of an op with the q-dq around it. What only moves
values is put before the dequantize that it follows. A quantize behind a dequantize becomes nothing, or a
table. What is left computes in floats between two explicit conversions.
"""

import operator
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchq_compat.lower.integers import operators, qdq_graph
from torchq_compat.lower.integers.lowered_graph import Kernel, LoweredGraph, Refusal, origin_of
from torchq_compat.lower.integers.rules import FAMILIES
from torchq_compat.lower.integers.rules.moves import clamp, copying, moved_qparams, write_move
from torchq_compat.lower.integers.rules.tables import requantize, table_of_chain
from torchq_compat.ops import those
from torchq_compat.read.qdq import DEQUANTIZE, QUANTIZE, is_dequantize, is_qdq
from torchq_compat.read.qparams import PerTensorQParams
from torchq_compat.support import metadata
from torchq_compat.support.decisions import FUSED, Action, Decision
from torchq_compat.support.dtypes import KERNEL_DTYPES
from torchq_compat.support.graph_nodes import module_path_of, replace_node
from torchq_compat.support.upstream import OpOverload

ATEN = torch.ops.aten
#: The reason for an op without a node in the lowered graph.
NOTHING = "does nothing in evaluation"
#: Kernels that saturate their results to a range -> the positions of its ends among their arguments.
SATURATES = {
    operators.CONVOLUTION: (-3, -2),
    operators.LINEAR: (-3, -2),
    operators.ARITHMETIC: (-3, -2),
    operators.QUANTIZE: (-3, -2),
}


class Rewriter:
    """Writes the lowered graph of ``reference``.

    Args:
        input_qparams: name of an input -> the qparams on which its floats lie, and of the 8-bit integers that
            the lowered graph takes in their place.
        left_float: name of an op -> why the configuration leaves it float.
        refused: name of an op -> why it must not run on integers.

    Attributes:
        lowered: the lowered graph.
        stands_for: node of the lowered graph -> the place of the reference whose value it has.
    """

    def __init__(
        self,
        reference: GraphModule,
        input_qparams: Mapping[str, PerTensorQParams],
        left_float: Mapping[str, str],
        refused: Mapping[str, str],
    ) -> None:
        self.reference = reference
        self.left_float = left_float
        self.refused = refused
        self.lowered = LoweredGraph(reference)
        self.reference_node = {copied: node for node, copied in self.lowered.origins.items()}
        self.stands_for: dict[Node, qdq_graph.Counterpart] = {
            copied: qdq_graph.Counterpart(node) for copied, node in self.reference_node.items()
        }
        self.answers: dict[Node, tuple[Action, str, bool]] = {}
        self.names: dict[Node, str] = {}
        self._covered: set[Node] = set()
        self._take_integers(input_qparams)

    def run(self, *, returns_integers: bool = False) -> None:
        """Rewrite the graph, which returns integers in place of their floats if that is asked for."""
        for node in list(self.lowered.graph.nodes):
            if node.target in those("check") and qdq_graph.integers_at(node.args[0]) is not None:
                self.lowered.graph.erase_node(node)  # It would keep floats that are sure to be float32.
                continue
            if node in self._covered or node.op != "call_function" or not node.users:
                continue
            with self.lowered.before(node):
                if node.target is QUANTIZE:
                    self._quantize_again(node)
                elif not (is_qdq(node) or node.target in those("size")):
                    self._rewrite(node)
        if returns_integers:
            output = self.lowered.graph.output_node()
            for result in output.all_input_nodes:
                if (source := qdq_graph.integers_at(result)) is not None:
                    output.replace_input_with(result, source.node)
        self._finish()

    def _take_integers(self, all_qparams: Mapping[str, PerTensorQParams]) -> None:
        """Let inputs whose floats lie on the steps of qparams be integers."""
        for node in self.lowered.graph.find_nodes(op="placeholder"):
            if (qparams := all_qparams.get(str(node.target))) is not None:
                readers = list(node.users)
                with self.lowered.graph.inserting_after(node):
                    floats = self._dequantize(node, qparams, node)
                for reader in readers:
                    reader.replace_input_with(node, floats)
                self.stands_for[node] = qdq_graph.Counterpart(self.reference_node[node], qparams)

    def _dequantize(self, integers: Node, qparams: PerTensorQParams, like: Node) -> Node:
        """Insert the dequantize of ``integers`` in the place of ``like``."""
        dequantize = self.lowered.call(DEQUANTIZE, integers, *qparams.arguments())
        dequantize.meta = dict(like.meta)
        self.stands_for[dequantize] = self.stands_for[like]
        return dequantize

    def _quantize_again(self, quantize: Node) -> None:
        source, qparams = qdq_graph.integers_at(quantize.args[0]), PerTensorQParams.of_node(quantize)
        if source is not None and qparams.dtype in KERNEL_DTYPES:
            written = requantize(self.lowered, source, qparams)
            self._replace(quantize, written)
            if written is not source.node:
                self.names[written] = quantize.name

    def _rewrite(self, op: Node) -> None:
        why_float = self.refused.get(op.name)
        if why_float is not None:
            self._tell(op, Action.REFERENCE, f"runs in floats between its q-dq: {why_float}", warn=True)
            self._in_order(op)
        elif self._clamp(op):
            return
        else:
            answer = self._ask(op)
            if isinstance(answer, Kernel):
                self._use(op, answer)
                return
            if answer is not None and _is_quantized(op):
                reason = f"runs in floats between its q-dq: {answer.reason}"
                self._tell(op, Action.REFERENCE, reason, warn=answer.warn)
        if why_float is None:
            self._move(op)
        if op.target in those("reads memory"):
            self._in_order(op)

    def _tell(self, op: Node, action: Action, reason: str, *, warn: bool = False) -> None:
        # Others compute nothing that a user wrote.
        if not (is_qdq(op) or op.target in those("size") or op.target is operator.getitem):
            self.answers[op] = (action, reason, warn)

    def _ask(self, op: Node) -> Kernel | Refusal | None:
        if not isinstance(op.target, OpOverload):
            return None
        result = qdq_graph.result_of(op)
        if op.name not in self.left_float and any(item.name in self.left_float for item in result.covered):
            result = qdq_graph.Result((op,), op, None)
        site = qdq_graph.OpSite(self.reference, op, qdq_graph.arguments_of(op), result)
        if op.name in self.left_float:
            # A table has the reference's numbers.
            answer = table_of_chain(site) if moved_qparams(op) is None else None
            return answer if isinstance(answer, Kernel) else None
        refusal = None
        for family in FAMILIES:
            rule = family.rules.get(op.target)
            answer = rule(site) if rule is not None else None
            if isinstance(answer, Kernel):
                return replace(answer, value=answer.value or site.result.last)
            refusal = refusal or answer
        if moved_qparams(op) is not None and (
            op.target not in qdq_graph.CLAMPS or site.result.qparams is None
        ):
            return None
        answer = table_of_chain(site)
        return answer if isinstance(answer, Kernel) else refusal or answer or _no_kernel(op)

    def _use(self, op: Node, kernel: Kernel) -> None:
        value, written = kernel.value, kernel.write(self.lowered)
        assert value is not None
        self._tell(op, Action.LOWERED, ", ".join(filter(None, (f"runs as {kernel.name}", kernel.note))))
        node, covered = value, []
        while node is not op:
            covered.append(node)
            (node,) = (producer for producer in node.all_input_nodes if producer.op != "get_attr")
        for item in covered:
            self._covered.add(item)
            self._tell(item, Action.LOWERED, FUSED)
        self._replace(value, written)
        self.stands_for[written] = self.stands_for[written]._replace(
            is_judged=kernel.is_as_reference, op=self.reference_node[op]
        )
        self.names[written] = op.name

    def _replace(self, value: Node, written: Node) -> None:
        """Let all readers of ``value`` read ``written``."""
        value.replace_all_uses_with(written, propagate_meta=False)
        if written not in self.stands_for:
            written.meta.setdefault("val", qdq_graph.example_value(value))
            self.stands_for[written] = self.stands_for[value]

    def _clamp(self, op: Node) -> bool:
        """Put a clamp to a range of floats, whose result has the qparams of its input, on the integers."""
        source = qdq_graph.integers_at(op.args[0]) if op.target in qdq_graph.CLAMPS else None
        quantize = qdq_graph.only_reader(op)
        if source is None or quantize is None or quantize.target is not QUANTIZE:
            return False
        if PerTensorQParams.of_node(quantize) != source.qparams:
            return False
        bounds = qdq_graph.CLAMPS[op.target](qdq_graph.arguments_of(op))
        if not all(bound is None or isinstance(bound, (int, float)) for bound in bounds):
            return False
        self._covered.add(quantize)
        written = self._narrowed(op, source, bounds, self.stands_for[quantize])
        self._tell(
            op, Action.LOWERED, FUSED if written is source.node else "runs on the integers, as a clamp"
        )
        self._replace(quantize, written)
        if written is not source.node:
            self.names[written] = op.name
        return True

    def _narrowed(
        self,
        op: Node,
        source: qdq_graph.Integers,
        bounds: tuple[float | None, float | None],
        value: qdq_graph.Counterpart,
    ) -> Node:
        """Return the clamped integers: if nothing else reads them, the kernel that makes them saturates, and
        has the ``value`` of the clamp."""
        result, dequantize = source.node, op.args[0]
        assert isinstance(dequantize, Node)
        written = clamp(self.lowered, source, *bounds)
        if result.target not in SATURATES or len(result.users) > 2 or len(dequantize.users) > 1:
            return written
        _, least, most = written.args
        args, (first, second) = list(result.args), SATURATES[result.target]
        args[first], args[second] = max(args[first], least), min(args[second], most)  # type: ignore[type-var]
        result.args = tuple(args)
        self.lowered.graph.erase_node(written)
        self.stands_for[result] = value
        return result

    def _move(self, op: Node) -> None:
        """Let ``op`` move integers, and dequantize behind it."""
        qparams = moved_qparams(op)
        if qparams is None:
            return
        several = isinstance(qdq_graph.example_value(op), (tuple, list))
        if several and any(user.target is not operator.getitem for user in op.users):
            return
        why_float = self.left_float.get(op.name)
        values = f", with the values it has in floats; it has no q-dq: {why_float}" if why_float else ""
        source = qdq_graph.integers_at(op.args[0]) if op.target in qdq_graph.CLAMPS else None
        if source is None:
            written, nothing = write_move(self.lowered, op, qparams), NOTHING
        else:
            bounds = qdq_graph.CLAMPS[op.target](qdq_graph.arguments_of(op))
            value = qdq_graph.Counterpart(self.reference_node[op], qparams)
            written, nothing = self._narrowed(op, source, bounds, value), f"{FUSED}{values}"
        is_nothing = written in self.stands_for
        self._tell(op, Action.LOWERED, nothing if is_nothing else f"runs on the integers as it is{values}")
        if not is_nothing:
            self.names[written] = op.name
        for result in list(op.users) if several else [op]:
            integers = written
            if several:
                integers = self.lowered.call(operator.getitem, written, result.args[1])
                # Of its own: torchao's numeric debugger compares values by where they come from.
                integers.meta.update(origin_of(result))
                self.names[integers] = result.name
                self._covered.add(result)
            if integers not in self.stands_for:
                integers.meta.setdefault("val", result.meta.get("val"))
                self.stands_for[integers] = qdq_graph.Counterpart(self.reference_node[result], qparams)
            result.replace_all_uses_with(self._dequantize(integers, qparams, result), propagate_meta=False)
        if is_nothing:
            self.lowered.graph.erase_node(op)  # torch.fx takes a dropout for random, and would keep it.

    def _in_order(self, op: Node) -> None:
        """Let ``op`` read memory in the order that the reference has."""
        for source in op.all_input_nodes:
            value = qdq_graph.example_value(source)
            if isinstance(value, Tensor) and value.is_contiguous() and source.op != "get_attr":
                op.replace_input_with(source, self.lowered.call(ATEN.contiguous.default, source))

    def _finish(self) -> None:
        """Write conversions that are left by the package's operators, and drop what is not read."""
        graph = self.lowered.graph
        graph.eliminate_dead_code(lambda node: node.op == "call_module" or node.is_impure())
        for node in list(graph.nodes):
            node.target = copying(node.target)
            if node.target not in (QUANTIZE, DEQUANTIZE) or node.kwargs:
                continue
            qparams = PerTensorQParams.of_node(node)
            if qparams.dtype not in KERNEL_DTYPES:
                continue
            convert = self.lowered.quantize if node.target is QUANTIZE else self.lowered.dequantize
            with self.lowered.before(node):
                written = convert(node.args[0], qparams)
            written.meta = dict(node.meta)
            self.stands_for[written] = self.stands_for[node]
            replace_node(node, written)
        for node in graph.nodes:
            node.name = self.names.get(node, node.name)
            if node in self.stands_for:
                place = self.stands_for[node]
                metadata.REFERENCE_NODE.write(node, place.node.name)
                if place.node.target is QUANTIZE or place.qparams is not None:
                    metadata.INTEGERS.write(node, place.qparams or PerTensorQParams.of_node(place.node))

    def decisions(self) -> Iterator[Decision]:
        """Yield the decision about every op, in graph order."""
        for node, copied in self.lowered.origins.items():
            if copied in self.answers:
                action, reason, warn = self.answers[copied]
                path = module_path_of(node)
                place = f"{path}/{node.name}" if path else node.name
                yield Decision(place, str(node.target), action, reason, node=node.name, warn=warn)


def _is_quantized(op: Node) -> bool:
    """Return whether the reference graph quantizes an input or the result of ``op``."""
    return any(map(is_dequantize, op.all_input_nodes)) or any(user.target is QUANTIZE for user in op.users)


def _no_kernel(op: Node) -> Refusal:
    sources = map(qdq_graph.integers_at, op.all_input_nodes)
    if len({source.qparams if source else None for source in sources}) > 1:
        return Refusal("it has no integer kernel, or its inputs have different qparams")
    return Refusal("it has no integer kernel here")
