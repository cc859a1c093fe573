"""Carry out a plan: write the lowered graph beside the reference graph.

A value has up to three forms in the lowered graph: a quantized tensor, its integers, and floats. A node of
the reference graph gets only the forms that are read; each is made once.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from torchq_compat.lower.x86.kernels.kernel_base import Constant, Floats, KernelCall, Quantized
from torchq_compat.lower.x86.memory_layouts import CLONE, has_own_layout, layout_read, reads_by_layout
from torchq_compat.lower.x86.opaque_boundary import simplify_boundaries
from torchq_compat.lower.x86.plan import Plan
from torchq_compat.lower.x86.qdq_operands import (
    SIZE_OPS,
    is_integers,
    is_whole_range,
    rank_of,
    takes_and_returns_tensors,
)
from torchq_compat.lower.x86.tuple_codegen import without_pytree
from torchq_compat.opaque_calls.opaque_module import OpaqueModule
from torchq_compat.qspecs.qdq import DEQUANTIZE, DEQUANTIZES, QUANTIZE, insert_quantize
from torchq_compat.qspecs.qparams import PerTensorQParams
from torchq_compat.support import metadata
from torchq_compat.support.dtypes import LEGACY_DTYPES
from torchq_compat.support.quantized_tensors import DEQUANTIZE_OP, INTEGERS_OP, OF_INTEGERS_OP, QUANTIZE_OP

__all__ = ["COPYING", "LoweredGraph", "write_lowered_graph", "write_lowered_region"]

ATEN = torch.ops.aten
#: A view of channels-last activations, which convolution kernels return, may need a copy.
COPYING: dict[Any, Any] = {ATEN.view.default: ATEN.reshape.default}


class LoweredGraph:
    """A graph and the constants it reads beside those of the reference graph."""

    def __init__(self, graph: Graph, home: str) -> None:
        self.graph = graph
        self.home = home
        self.constants: dict[str, Any] = {}

    def constant(self, value: Any) -> Node:
        """Return a node that reads ``value``."""
        name = f"constant_{len(self.constants)}"
        self.constants[name] = value
        # Not graph.get_attr, which looks for the attribute on a module that does not have it yet.
        return self.graph.create_node("get_attr", f"{self.home}.{name}")


#: The metadata of a reference node that point to the user's code.
ORIGIN_KEYS = ("stack_trace", "nn_module_stack", "torch_fn", "source_fn_stack", "from_node")


def write_lowered_graph(
    reference: GraphModule,
    plan: Plan,
    opaque_paths: dict[str, str],
    in_floats: dict[str, OpaqueModule],
    home: str,
) -> LoweredGraph:
    """Return the lowered graph of ``reference``.

    Args:
        opaque_paths: path of an opaque module in ``reference`` -> path of the module called in its place.
        in_floats: path in ``reference`` -> module, for modules that accept and return floats where the
            reference graph holds integers.
        home: path of the namespace that will hold the constants.
    """
    writer = _Writer(plan, opaque_paths, in_floats, LoweredGraph(Graph(), home))
    graph = writer.lowered.graph
    for node in reference.graph.nodes:
        writer.write(node)
        _record_origin(graph, node)
    called = {opaque_paths[path]: module for path, module in in_floats.items()}
    simplify_boundaries(graph, called, writer.carried)
    if takes_and_returns_tensors(reference):
        _return_the_tensor(graph)
    else:
        graph.set_codegen(without_pytree(reference.graph._codegen))
    graph.eliminate_dead_code(_has_effect)
    return writer.lowered


def write_lowered_region(
    nodes: Iterable[Node], plan: Plan, inputs: Sequence[Node], outputs: Sequence[Node], home: str
) -> LoweredGraph:
    """Return the lowered graph of some nodes of a reference graph.

    Args:
        nodes: the nodes, with all that they read beside ``inputs``, in the order of the reference graph.
        inputs: the placeholders of the lowered graph stand for these; they have the form that the reference
            graph has, integers or floats, and so have the results.
        outputs: the nodes whose values it returns, as a list.
        home: see ``write_lowered_graph``.
    """
    writer = _Writer(plan, {}, {}, LoweredGraph(Graph(), home))
    graph = writer.lowered.graph
    for node in inputs:
        (writer.integers if is_integers(node) else writer.floats)[node] = graph.placeholder(node.name)
    for node in nodes:
        writer.write(node)
        _record_origin(graph, node)
    graph.output([writer.as_reference(node) for node in outputs])
    graph.eliminate_dead_code(_has_effect)
    return writer.lowered


def _record_origin(graph: Graph, origin: Node) -> None:
    """Give the newest nodes of ``graph`` the origin of ``origin``, a node of the reference graph."""
    told = {key: origin.meta[key] for key in ORIGIN_KEYS if key in origin.meta}
    for node in reversed(graph.nodes):
        if metadata.REFERENCE_NODE.is_on(node):
            break
        node.meta = {**told, **node.meta, metadata.REFERENCE_NODE.name: origin.name}


def _return_the_tensor(graph: Graph) -> None:
    """Return the one result without pytree's codegen, which takes longer than a small kernel."""
    output = graph.output_node()
    returned = output.args[0]
    assert isinstance(returned, (tuple, list))
    output.args = (returned[0],)


def _has_effect(node: Node) -> bool:
    # Graph.eliminate_dead_code would look up called modules in a module that this graph does not have yet.
    return node.op == "call_module" or node.is_impure()


def _name_after(written: Node, op: Node) -> None:
    """Name ``written`` after the op it computes, and keep the user's line."""
    written._rename(op.name)
    written.meta.update({key: op.meta[key] for key in ORIGIN_KEYS if key in op.meta})


class _Writer:
    def __init__(
        self, plan: Plan, opaque_paths: dict[str, str], in_floats: Container[str], lowered: LoweredGraph
    ) -> None:
        self.lowered = lowered
        self.graph = self.lowered.graph
        self.plan = plan
        self.opaque_paths = opaque_paths
        self.in_floats = in_floats
        self.covered = plan.covered()
        self.carried: set[Node] = set()
        self.quantized: dict[Node, Node] = {}
        self.integers: dict[Node, Node] = {}
        self.floats: dict[Node, Node] = {}

    def write(self, node: Node) -> None:
        """Write the counterpart of ``node``, unless one of its forms is written only when it is read."""
        if node in self.covered or node in self.floats:
            return
        if node in self.plan.kernels:
            self._write_kernel(node, self.plan.kernels[node])
        elif node in self.plan.carried:
            target = COPYING.get(node.target, node.target)
            args: Any = map_arg(node.args, self._quantized_or_size)
            if reads_by_layout(node.target):
                source = node.all_input_nodes[0]
                args = (self._plain(source, self._as_quantized(source)), *args[1:])
            self.quantized[node] = self.graph.call_function(target, args, dict(node.kwargs))
            self.carried.add(self.quantized[node])
            _name_after(self.quantized[node], node)
        elif node.target is QUANTIZE and node in self.plan.qparams_of:
            self._write_quantize(node, self.plan.qparams_of[node])
        elif node.op == "call_module" and str(node.target) in self.in_floats:
            self._write_call_in_floats(node)
        elif node.target in DEQUANTIZES and self._was_left_in_floats(node.all_input_nodes[0]):
            self.floats[node] = self.floats[node.all_input_nodes[0]]
        elif node.target is not DEQUANTIZE or node not in self.plan.qparams_of:
            self._copy(node)

    def _write_kernel(self, node: Node, call: KernelCall) -> None:
        result = self._call(call)
        _name_after(result, call.covers[0] if call.covers else node)
        if call.returns_floats:
            self.floats[node] = result
        else:
            self.quantized[node] = self._saturated(result, self.plan.qparams_of[node])

    def _call(self, call: KernelCall) -> Node:
        args = [self._argument(argument) for argument in call.args]
        if reads_by_layout(call.kernel) and isinstance(call.args[0], Quantized):
            args[0] = self._plain(call.args[0].node, args[0])
        return self.graph.call_function(call.kernel, tuple(args))

    def _plain(self, node: Node, quantized: Node) -> Node:
        """Return ``quantized``, the form of ``node``, in a layout that no kernel mistakes."""
        if has_own_layout(node):
            return quantized
        return self.graph.call_function(CLONE, (quantized,), layout_read(rank_of(node)))

    def _argument(self, argument: Any) -> Any:
        if isinstance(argument, KernelCall):
            return self._call(argument)
        if isinstance(argument, list):
            return [self._argument(each) for each in argument]
        if isinstance(argument, Quantized):
            return self._as_quantized(argument.node)
        if isinstance(argument, Floats):
            return self.as_reference(argument.node)
        if isinstance(argument, Constant):
            return self.lowered.constant(argument.value)
        return map_arg(argument, self.as_reference)

    def _write_quantize(self, node: Node, qparams: PerTensorQParams) -> None:
        source = node.args[0]
        assert isinstance(source, Node)
        if self.plan.qparams_of.get(source) == qparams:
            self.quantized[node] = self._as_quantized(source)
            return
        self.quantized[node] = self._saturated(self._quantize(self.as_reference(source), qparams), qparams)

    def _quantize(self, floats: Node, qparams: PerTensorQParams) -> Node:
        args = (floats, qparams.scale, qparams.zero_point, LEGACY_DTYPES[qparams.dtype])
        return self.graph.call_function(QUANTIZE_OP, args)

    def _saturated(self, quantized: Node, qparams: PerTensorQParams) -> Node:
        """Clamp ``quantized`` to a range narrower than its dtype's, as after training: kernels do not."""
        if is_whole_range(qparams):
            return quantized
        low, high = (
            (bound - qparams.zero_point) * qparams.scale for bound in (qparams.quant_min, qparams.quant_max)
        )
        return self.graph.call_function(ATEN.clamp.default, (quantized, low, high))

    def _write_call_in_floats(self, node: Node) -> None:
        """Write the call of an opaque module that accepts and returns floats that lie on the steps of its
        qparams, which saves quantizing and dequantizing."""
        call = self.graph.node_copy(node, self._floats_or_reference)
        call.target = self.opaque_paths[str(node.target)]
        for getitem in node.users:
            self.floats[getitem] = self.graph.node_copy(getitem, {node: call}.__getitem__)

    def _was_left_in_floats(self, node: Node) -> bool:
        """Return whether this graph holds floats at ``node`` where the reference graph holds integers."""
        return is_integers(node) and node in self.floats

    def _floats_or_reference(self, node: Node) -> Node:
        if node not in self.floats and node in self.quantized:
            self.floats[node] = self.graph.call_function(DEQUANTIZE_OP, (self.quantized[node],))
        return self.floats[node] if node in self.floats else self.as_reference(node)

    def _copy(self, node: Node) -> None:
        form = self._any_form if node.target in SIZE_OPS else self.as_reference
        copied = self.graph.node_copy(node, form)
        if node.op == "call_module":
            copied.target = self.opaque_paths.get(str(node.target), node.target)
        else:
            copied.target = COPYING.get(node.target, node.target)
        (self.integers if is_integers(node) else self.floats)[node] = copied

    def as_reference(self, node: Node) -> Node:
        """Return the form that ``node`` has in the reference graph: integers, floats, or a value that is no
        tensor."""
        if not is_integers(node):
            if node not in self.floats:
                self.floats[node] = self.graph.call_function(DEQUANTIZE_OP, (self._as_quantized(node),))
            return self.floats[node]
        if node not in self.integers:
            self.integers[node] = self._to_integers(node)
        return self.integers[node]

    def _to_integers(self, node: Node) -> Node:
        if node in self.quantized:
            return self.graph.call_function(INTEGERS_OP, (self.quantized[node],))
        qparams = metadata.INTEGERS.required(node)
        assert qparams is not None
        make = self.lowered.constant
        return insert_quantize(self.graph, self.floats[node], qparams, lambda _, tensor: make(tensor))

    def _as_quantized(self, node: Node) -> Node:
        if node in self.quantized:
            return self.quantized[node]
        qparams = self.plan.qparams_of[node]
        # What was moved as integers leaves a region of torch.compile in floats, as in the reference.
        if node.op == "placeholder" or (node in self.plan.carried and node in self.floats):
            self.quantized[node] = self._quantize(self.floats[node], qparams)
            return self.quantized[node]
        # A dequantize: its quantized tensor is made from the integers that it reads.
        source = node.args[0]
        assert isinstance(source, Node)
        if source not in self.quantized:
            self.quantized[source] = self._to_quantized(source, qparams)
        self.quantized[node] = self.quantized[source]
        return self.quantized[node]

    def _to_quantized(self, node: Node, qparams: PerTensorQParams) -> Node:
        if node not in self.integers:
            return self._quantize(self.floats[node], qparams)
        args = (self.integers[node], qparams.scale, qparams.zero_point)
        return self.graph.call_function(OF_INTEGERS_OP, args)

    def _quantized_or_size(self, node: Node) -> Node:
        return self._as_quantized(node) if node in self.plan.qparams_of else self.as_reference(node)

    def _any_form(self, node: Node) -> Node:
        for forms in (self.quantized, self.floats, self.integers):
            if node in forms:
                return forms[node]
        return self._quantized_or_size(node)
