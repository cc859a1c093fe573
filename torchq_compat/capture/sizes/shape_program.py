"""Computes the shapes inside a captured graph at other sizes of its inputs, without computing any values."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import SymInt, Tensor, nn
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.fx.node import map_aggregate, map_arg

from torchq_compat.capture.sizes.numbers import Computed, Size, size_of, sizes_in
from torchq_compat.capture.sizes.size_reads import ReadSizes
from torchq_compat.support.process_state import Kept
from torchq_compat.support.upstream import LazyGraphModule, OpOverload, pytree

#: The operator that stands for a custom module in a trace.
OPAQUE = "torchq_compat.custom_module.default"


ATEN = torch.ops.aten
META = torch.device("meta")
#: An operator of torch, and the forms of its arguments -> its result: models repeat themselves, and torch
#: computes many shapes in Python, at milliseconds each.
KNOWN_SHAPES: Kept[Any] = Kept(8192)
#: How many results of its nodes a program keeps.
MOST_RESULTS = 65536
#: For how many sizes of its inputs a program keeps what is asked for.
MOST_SIZES = 1024
MISSING = object()


@dataclass(frozen=True)
class ShapeProgram:
    """A graph that runs on shapes.

    Attributes:
        graph_module: the graph; its results are the tensors whose sizes are asked for.
        inputs: for each input its label, and its dtype and rank if it is a tensor, else its value.
        asked: for each size that is asked for, the index of the result and the dimension.
        calls: the calls of custom modules in the graph.
    """

    graph_module: GraphModule
    inputs: tuple[tuple[str, Any, int], ...]
    asked: tuple[tuple[int, int | None], ...] = ()
    calls: frozenset[Node] = frozenset()

    @classmethod
    def of(cls, graph_module: GraphModule, inputs: Mapping[str, Any]) -> ShapeProgram:
        """Return the program of the whole of ``graph_module``, which takes ``inputs``, by label."""
        forms = (
            (label, value.dtype, value.dim()) if isinstance(value, Tensor) else (label, value, -1)
            for label, value in inputs.items()
        )
        return cls(graph_module, tuple(forms))

    @classmethod
    def of_sizes(
        cls, asked: Sequence[tuple[Node, int | None]], read: ReadSizes, inputs: Mapping[str, Any]
    ) -> ShapeProgram:
        """Return the program that computes sizes of nodes of a trace.

        Args:
            asked: nodes and dimensions.
            read: the trace.
            inputs: the inputs of the model, by label.
        """
        graph, twins = Graph(), dict[Node, Any]()
        for traced in read.inputs:
            placeholder = graph.placeholder(f"input_{len(twins)}")
            if traced is not None:
                twins[traced] = placeholder
        results = list(dict.fromkeys(node for node, _ in asked))
        writer = _Writer(graph, twins, read)
        graph.output(tuple(writer.written(node) for node in results))
        whole = cls.of(LazyGraphModule(writer.owner, graph), inputs)
        places = tuple((results.index(node), dim) for node, dim in asked)
        return replace(whole, asked=places, calls=frozenset(writer.calls))

    def __deepcopy__(self, memo: dict[int, Any]) -> ShapeProgram:
        """Return the program itself, which nothing changes."""
        return self

    def sizes(self, known: Mapping[tuple[str, int], Any]) -> dict[tuple[str, int], Any]:
        """Return the sizes that are asked for, by ``("", number)``, where the inputs have the ``known`` ones;
        those in front of the first operator that refuses its arguments, if one does. Those behind a call of a
        custom module whose results are not known are None."""

        def computed() -> dict[tuple[str, int], Any]:
            values = self._on_shapes.run_at(self.inputs, known, partly=True)
            refusing = next((node for node in self.graph_module.graph.nodes if node not in values), None)
            results: Any = self.graph_module.graph.output_node().args[0]
            tensors = [values.get(node) for node in results]
            return {
                ("", number): None if tensor is None else size_of(tensor, dim)
                for number, (index, dim) in enumerate(self.asked)
                if (tensor := tensors[index]) is not None or refusing in self.calls
            }

        key = tuple(known.get((label, dim)) for label, _, rank in self.inputs for dim in range(rank))
        are_plain = all(type(size) is int for size in key)
        return self._kept_sizes.of(key, computed) if are_plain else computed()

    @cached_property
    def _kept_sizes(self) -> Kept[dict[tuple[str, int], Any]]:
        return Kept(MOST_SIZES)

    @cached_property
    def _on_shapes(self) -> _OnShapes:
        return _OnShapes(self.graph_module)

    def values(self, known: Mapping[tuple[str, int], Any]) -> dict[Node, Any]:
        """Return the value of every node of the graph, each a tensor without values, or a number.

        Raises:
            Exception: what an operator raises at these sizes.
        """
        return self._on_shapes.run_at(self.inputs, known)


class _OnShapes(Interpreter):
    """Runs a graph with every tensor on the meta device."""

    def __init__(self, graph_module: GraphModule) -> None:
        super().__init__(graph_module, garbage_collect_values=False)
        nodes = list(graph_module.graph.nodes)
        numbers = {node: number for number, node in enumerate(nodes)}
        self._steps = [(node, [numbers[source] for source in node.all_input_nodes]) for node in nodes]
        # By the number of a node and the identities of its inputs: these are results too, so they are kept,
        # and no other object has their identity.
        self._kept: dict[Any, Any] = {}
        targets = {node.target for node in nodes if isinstance(node.target, OpOverload)}
        # An operator that changes the shape of a tensor in place would change a result that is kept.
        self._may_keep = not any(torch.Tag.inplace_view in target.tags for target in targets)

    def run_at(
        self,
        inputs: Sequence[tuple[str, Any, int]],
        known: Mapping[tuple[str, int], Any],
        *,
        partly: bool = False,
    ) -> dict[Node, Any]:
        """Return the value of each node, on tensors of the ``known`` sizes; ``partly``: those in front of the
        first operator that refuses its arguments."""
        if len(self._kept) > MOST_RESULTS:
            self._kept = {}
        values: list[Any] = []
        stopping = suppress(Exception) if partly else nullcontext()
        with torch.no_grad(), disable_proxy_modes_tracing(), torch._C.DisableTorchFunction(), stopping:
            # What a trace computes belongs to it alone, symbols for sizes too.
            is_traced = type(torch.empty(0, device="meta")) is not Tensor or torch._C._is_tracing()
            kept = self._kept if self._may_keep and not is_traced else None
            forms = iter(inputs)
            for number, (node, sources) in enumerate(self._steps):
                if node.op == "placeholder":
                    label, form, rank = next(forms)
                    shape = [known[label, dim] for dim in range(rank)]
                    key: Any = number, *shape
                else:
                    given = [values[source] for source in sources]
                    key = number, *[value if type(value) is int else id(value) for value in given]
                value = MISSING if kept is None else kept.get(key, MISSING)
                if value is MISSING:
                    if node.op != "placeholder":
                        value = self._computed(node, given, may_keep=kept is not None)
                    else:
                        value = form if rank < 0 else torch.empty(shape, dtype=form, device="meta")
                    if kept is not None:
                        kept[key] = value
                values.append(value)
        return {node: value for (node, _), value in zip(self._steps, values, strict=False)}

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return value.to("meta") if isinstance(value, Tensor) else value

    def _computed(self, n: Node, values: Sequence[Any], *, may_keep: bool) -> Any:
        target: Any = n.target
        read = dict(zip(n.all_input_nodes, values, strict=True))
        args, kwargs = map_arg((n.args, n.kwargs), read.__getitem__)
        if not may_keep or not isinstance(target, OpOverload) or target.namespace != "aten":
            return getattr(self, n.op)(target, args, kwargs)
        given = [value for value in values if isinstance(value, Tensor)]
        shape = _shape_of_common(target, given, args) if given else None
        if shape is not None:
            dtype = getattr(n.meta.get("val"), "dtype", given[0].dtype)
            is_same = shape == given[0].shape and dtype == given[0].dtype and given[0].is_contiguous()
            return given[0] if is_same else given[0].new_empty(shape, dtype=dtype)
        key = target, _form(args), _form(kwargs), torch.get_default_dtype()
        return KNOWN_SHAPES.of(key, lambda: self.call_function(target, args, kwargs))

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().call_function(
            target,
            *map_aggregate((args, kwargs), lambda value: META if isinstance(value, torch.device) else value),
        )


def _shape_of_common(target: Any, given: Sequence[Tensor], args: Any) -> Sequence[int] | None:
    """Return the shape that a common operator makes of the tensors it is ``given``; None if it may not take
    them, and for other operators."""
    x, *others = given
    if torch.Tag.pointwise in target.tags:
        shapes = {tensor.shape for tensor in given}
        return x.shape if len(shapes) == 1 else torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    if target is ATEN.roll.default:
        return x.shape
    if target is ATEN.batch_norm.default and all(other.shape == x.shape[1:2] for other in others):
        return x.shape
    if target is ATEN.layer_norm.default and list(x.shape[-len(args[1]) :]) == list(args[1]):
        return x.shape
    if target is ATEN.linear.default and others and x.shape[-1:] == others[0].shape[1:]:
        return (*x.shape[:-1], others[0].shape[0])
    return None


def _form(value: Any) -> Any:
    """Return what a shape depends on of an argument: 1, 1.0 and True are three."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, dict):
        return tuple((name, _form(item)) for name, item in value.items())
    return tuple(map(_form, value)) if isinstance(value, (tuple, list)) else (type(value), value)


def depends_on_values(graph: Graph) -> bool:
    """Return whether sizes in ``graph`` depend on values."""
    values = (leaf for node in graph.nodes for leaf in pytree.tree_leaves(node.meta.get("val")))
    return any(
        isinstance(value, SymInt)
        or (isinstance(value, Tensor) and any(isinstance(size, SymInt) for size in value.shape))
        for value in values
    )


def is_computable(node: Node | None, read: ReadSizes, known: set[Node]) -> bool:
    """Return whether the shape of ``node`` can be computed: not if a custom module does it by itself. Those
    that can be are added to ``known``."""
    for item in _in_order(node, read, known):
        if item is None or (str(item.target) == OPAQUE and not _computes_example(item, read)):
            return False
        known.add(item)
    return True


def _in_order(node: Node | None, read: ReadSizes, known: Container[Node | None]) -> Iterator[Node | None]:
    """Yield ``node`` behind those that it reads, and these behind theirs, without those that are ``known``;
    each is to be known then."""
    waiting = [node]
    while waiting:
        last = waiting[-1]
        needed = [] if last is None else [item for item in _read_by(last, read) if item not in known]
        waiting.extend(needed)
        if not needed and waiting.pop() not in known:
            yield last


def _computes_example(call: Node, read: ReadSizes) -> bool:
    """Return whether the shapes of the results of ``call`` in the example are what is computed of its
    arguments' shapes."""
    compute, results = read.calls.get(call), call.meta["val"]
    if compute is None:
        return False
    given = map_arg(call.args[:2], lambda node: node.meta["val"])
    tensors, sizes = pytree.tree_map_only(Tensor, _on_meta, given)
    try:
        computed = compute(tensors, sizes)
    except Exception:
        return False
    return [tensor.shape for tensor in computed] == [result.shape for result in results]


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=META)


def _read_by(node: Node, read: ReadSizes) -> list[Node]:
    known = read.known.get(node)
    if known is None:
        return node.all_input_nodes
    return [size.node for expression in known for size in sizes_in(expression)]


@dataclass
class _Writer:
    """Writes the part of a trace that computes some of its tensors."""

    graph: Graph
    twins: dict[Node, Any]
    read: ReadSizes
    owner: nn.Module = field(default_factory=nn.Module)
    calls: set[Node] = field(default_factory=set)

    def written(self, expected: Node) -> Node:
        """Return the twin of ``expected``, written after those that it reads."""
        for node in _in_order(expected, self.read, self.twins):
            assert node is not None
            self.twins[node] = self._twin(node)
        result: Node = self.twins[expected]
        return result

    def _twin(self, node: Node) -> Node:
        if node in self.read.known:
            sizes = [self._number(expression) for expression in self.read.known[node]]
            options = {"dtype": node.meta["val"].dtype, "device": torch.device("meta")}
            return self.graph.call_function(torch.ops.aten.empty.memory_format, (sizes,), options)
        if node.op in ("placeholder", "get_attr"):
            name, value = f"of_{len(self.twins)}", node.meta["val"]
            empty = torch.empty_strided(tuple(value.shape), value.stride(), dtype=value.dtype, device="meta")
            self.owner.register_buffer(name, empty, persistent=False)
            return self.graph.get_attr(name)
        if (compute := self.read.calls.get(node)) is not None:
            given: Any = map_arg(node.args[:2], self.twins.__getitem__)  # without its handle and layout
            call = self.graph.call_function(compute, given)
            self.calls.add(call)
            return call
        value = node.meta.get("val")
        result = self.graph.node_copy(node, self.twins.__getitem__)
        result.meta = {"val": torch.empty(0, dtype=value.dtype)} if isinstance(value, Tensor) else {}
        return result

    def _number(self, expression: Any) -> Any:
        if isinstance(expression, Size):
            place = (self.twins[expression.node], expression.dim)
            return self.graph.call_function(torch.ops.aten.sym_size.int, place)
        if isinstance(expression, Computed):
            parts = tuple(self._number(operand) for operand in expression.operands)
            return self.graph.call_function(expression.operation.function, parts)
        return expression
