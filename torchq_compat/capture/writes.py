"""Rewrites in-place ops of a graph as ops that return values."""

import operator
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from torchq_compat.capture.origins import meta_outside_leaves
from torchq_compat.errors import CaptureError
from torchq_compat.ops import those
from torchq_compat.support.graph_nodes import user_line_of
from torchq_compat.support.upstream import OpOverload

ATEN = torch.ops.aten


# Computes the new value of a tensor from the new value of a view of it.


#: Ops that return their input when applied twice.
EXCHANGES = ("adjoint", "mH", "mT", "matrix_H", "numpy_T", "swapaxes", "swapdims", "t", "transpose")
#: An op that returns a part of a tensor -> the op that returns the tensor with that part replaced.
SCATTERS = {
    "select": ATEN.select_scatter.default,
    "slice": ATEN.slice_scatter.default,
    "diagonal": ATEN.diagonal_scatter.default,
}
#: Ops that split a tensor along a dimension into pieces whose concatenation is the tensor.
SPLITS = ("chunk", "split", "split_with_sizes", "tensor_split")


def scatters(view: Node) -> bool:
    """Return whether an aten op puts the part ``view`` back into its tensor."""
    return _name_of(view) in SCATTERS


def scatter_of(view: Node) -> OpOverload:
    """Return the op that puts the part ``view`` back into its tensor."""
    return SCATTERS[_name_of(view)]


def is_same_view(node: Node, other: Node) -> bool:
    """Return whether both nodes are the same view of the same value."""
    return (node.target, node.args, node.kwargs) == (other.target, other.args, other.kwargs)


def is_whole(view: Node) -> bool:
    """Return whether ``view`` is its base under another name, as the result of an Identity is."""
    return (
        view.target in those("reshapes")
        and view.target is not ATEN.detach.default
        and are_alike(view.args[0], view)
    )


def are_alike(node: Any, other: Node) -> bool:
    """Return whether the example values of both have the same shape, dtype and device."""
    ours = node.meta.get("val") if isinstance(node, Node) else None
    theirs = other.meta.get("val")
    if not isinstance(ours, Tensor) or not isinstance(theirs, Tensor):
        return False
    return (str(ours.shape), ours.dtype, ours.device) == (str(theirs.shape), theirs.dtype, theirs.device)


def whole_of_view(view: Node, parent: Node, value: Node, meta: dict[str, Any]) -> tuple[Node, Node]:
    """Return the base of ``view``, and the base's value when ``value`` is the value of the view. New nodes
    are inserted at the graph's insertion point.

    Args:
        view: a view of ``parent``, or a piece of a tensor that ``parent`` split.
        value: the new value of the view.
        meta: the metadata of new nodes, except their example values.

    Raises:
        CaptureError: no op computes the value of the base.
    """
    if view.target is operator.getitem:
        return _whole_of_piece(view, parent, value, meta)
    base: Any = view.args[0]
    if is_whole(view):
        return base, value
    remaining: Any = view.args[1:]
    name, graph = _name_of(view), view.graph
    if name in SCATTERS:
        result = graph.call_function(SCATTERS[name], (base, value, *remaining), view.kwargs)
    elif name == "narrow":
        dim, start, length = remaining
        are_known = isinstance(start, int) and isinstance(length, int)
        end = start + length if are_known else graph.call_function(operator.add, (start, length))
        result = graph.call_function(ATEN.slice_scatter.default, (base, value, dim, start, end))
    elif view.target in those("reshapes") and _dtype_of(view) == _dtype_of(base):
        result = graph.call_function(ATEN.reshape_as.default, (value, base))
    elif name in EXCHANGES:
        result = graph.call_function(view.target, (value, *remaining), view.kwargs)  # type: ignore[arg-type]
    elif name == "permute":
        dims = [dim % len(remaining[0]) for dim in remaining[0]]
        inverse = [dims.index(dim) for dim in range(len(dims))]
        result = graph.call_function(ATEN.permute.default, (value, inverse))
    elif name == "movedim":
        result = graph.call_function(view.target, (value, remaining[1], remaining[0]))  # type: ignore[arg-type]
    else:
        raise _without_form(view)
    result.meta = {**meta, "val": base.meta.get("val")}
    return base, result


def _whole_of_piece(view: Node, parent: Node, value: Node, meta: dict[str, Any]) -> tuple[Node, Node]:
    base: Any = parent.args[0]
    graph, name, count = view.graph, _name_of(parent), len(parent.meta["val"])
    if name not in (*SPLITS, "unbind"):
        raise _without_form(view)
    pieces: list[Node] = []
    for index in range(count):
        if index == view.args[1]:
            pieces.append(value)
            continue
        pieces.append(graph.call_function(operator.getitem, (parent, index)))
        pieces[-1].meta = {**meta, "val": parent.meta["val"][index]}
    at = 1 if name == "unbind" else 2
    dim: Any = parent.kwargs.get("dim", parent.args[at] if len(parent.args) > at else 0)
    result = graph.call_function(ATEN.stack.default if name == "unbind" else ATEN.cat.default, (pieces, dim))
    result.meta = {**meta, "val": base.meta.get("val")}
    return base, result


def _name_of(node: Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return "" if schema is None else str(schema.name).removeprefix("aten::")


def _dtype_of(node: Any) -> Any:
    return getattr(node.meta.get("val"), "dtype", None)


def _without_form(view: Node) -> CaptureError:
    line = user_line_of(view)
    where = f" at {line}" if line else ""
    return CaptureError.of("TQ920.write_into_view", view=view.target, where=where)


# Makes in-place ops on intermediate values out of place; ``x += y`` becomes ``x + y``, as FX traced it.
#
# A converted graph has a dequantize per consumer, and a lowered one has integers: only one consumer would
# see a write into one of these. So later readers of the value read the result of the op instead, also if
# they read it through a view that was written into, or through a view of the written value. A write into a
# view becomes an op that returns the base with that part replaced (``select_scatter``, ``slice_scatter``,
# ...).


def make_out_of_place(graph_module: GraphModule, *, keep_writes_into_views: bool = False) -> None:
    """Rewrite the in-place ops of ``graph_module`` out of place.

    The new value of a float buffer or input is copied into it; writes into counters stay in place.

    Args:
        keep_writes_into_views: keep writes into parts of a value, unless each is written again and again.

    Raises:
        CaptureError: an op writes into a view that has no out-of-place form, such as one of
            ``Tensor.unfold``.
    """
    if any(_functional_overload(node) is not None for node in graph_module.graph.nodes):
        _Rewriting(graph_module, keep_writes_into_views).run()
    graph_module.recompile()


@dataclass(eq=False)
class _Memory:
    """Memory that one or more nodes refer to.

    Attributes:
        home: the node that created it.
        value: the node that returns its current value.
        version: how often it was written into.
        names: the nodes that refer to it, as a whole or as a view.
    """

    home: Node
    value: Node
    version: int = 0
    names: list[Node] = field(default_factory=list)


@dataclass(frozen=True)
class _Name:
    """The reference of a node to ``memory`` at ``version``: a view of ``parent``, or all of it if that is
    None.
    """

    memory: _Memory
    parent: Node | None
    version: int


class _Rewriting:
    """One pass over a graph that turns writes into values, and repeats views of memory written since."""

    def __init__(self, graph_module: GraphModule, keep_writes_into_views: bool) -> None:
        self.graph = graph_module.graph
        self.keep_writes_into_views = keep_writes_into_views
        parts = Counter(_part_written(node) for node in self.graph.nodes if _functional_overload(node))
        #: Tensors with parts that are written once or twice; one that is written in every step is a state.
        self.written_in_parts = {part[0] for part, count in parts.items() if len(part) > 1 and count <= 2}
        self.names: dict[Node, _Name] = {}
        #: Node -> the node that its readers read instead; for results of writes into views, and for tensors
        #: whose shape was changed in place.
        self.handed: dict[Node, Node] = {}
        self.again: dict[tuple[Node, int], Node] = {}

    def run(self) -> None:
        for node in list(self.graph.nodes):
            self._read_current_values(node)
            functional = _functional_overload(node)
            written = node.args[0] if node.args else None
            if functional is None or not isinstance(written, Node) or written not in self.names:
                self._name(node)
            elif self._is_left_in_place(node, written):
                self.handed[node] = written
            elif _is_view_op(functional):
                node.target = functional
                self._name(node)
                self.handed[written] = node
            else:
                self._write(node, written, functional)
        self._drop_what_nobody_reads()

    def _read_current_values(self, reader: Node) -> None:
        reader.args = map_arg(reader.args, lambda node: self._current(node, reader))
        reader.kwargs = map_arg(reader.kwargs, lambda node: self._current(node, reader))

    def _current(self, node: Node, reader: Node) -> Node:
        """Return a node with the current value of the memory that ``node`` refers to; a view is repeated in
        front of ``reader``."""
        while node in self.handed:
            node = self.handed[node]
        return self._shown(node, reader)

    def _shown(self, node: Node, reader: Node) -> Node:
        name = self.names.get(node)
        if name is None or name.version == name.memory.version:
            return node
        if name.parent is None:
            return name.memory.value
        if is_whole(node):
            return self._shown(name.parent, reader)
        key = node, name.memory.version
        if key not in self.again:
            parent = self._shown(name.parent, reader)
            with self.graph.inserting_before(reader):
                again = self.graph.create_node(node.op, node.target, (parent, *node.args[1:]), node.kwargs)
            again.meta = meta_outside_leaves(node)
            self._add_name(again, name.memory, parent)
            self.again[key] = again
        return self.again[key]

    def _name(self, node: Node) -> None:
        source = node.args[0] if node.op == "call_function" and node.args else None
        if isinstance(source, Node) and source in self.names and _is_view(node, source):
            self._add_name(node, self.names[source].memory, source)
        elif node.op != "output":
            self._add_name(node, _Memory(node, node), None)

    def _add_name(self, node: Node, memory: _Memory, parent: Node | None) -> None:
        self.names[node] = _Name(memory, parent, memory.version)
        memory.names.append(node)

    def _is_left_in_place(self, node: Node, written: Node) -> bool:
        name = self.names[written]
        is_local = name.memory.home.op not in ("placeholder", "get_attr")
        if self.keep_writes_into_views:
            return not is_local or name.memory.home in self.written_in_parts
        value = node.meta.get("val")
        return not is_local and not (isinstance(value, Tensor) and value.is_floating_point())

    def _write(self, node: Node, written: Node, functional: OpOverload) -> None:
        """Make ``node`` return what it wrote, and record the old value with that part replaced as the value
        of the memory."""
        memory, part, value = self.names[written].memory, written, node
        node.target = functional
        if functional is ATEN.copy.default and scatters(written):
            source = node.args[1]
            assert isinstance(source, Node)
            if is_same_view(source, written):  # ``x[0] += y`` writes its result a second time.
                self.handed[node] = written
                return
            value = source if are_alike(source, written) else node
        elif functional is ATEN.copy.default and are_alike(node.args[1], written):
            # aten.copy has no derivative.
            node.target, node.args = ATEN.clone.default, (node.args[1],)
        meta = {key: value for key, value in meta_outside_leaves(node).items() if key != "torch_fn"}
        with self.graph.inserting_before(node.next):
            while (parent := self.names[part].parent) is not None:
                part, value = whole_of_view(part, parent, value, meta)
            if memory.home.op in ("placeholder", "get_attr"):
                kept = self.graph.call_function(ATEN.copy_.default, (memory.home, value))
                kept.meta = {**meta, "val": memory.home.meta.get("val")}
        memory.value, memory.version = value, memory.version + 1
        self._add_name(value, memory, None)
        if value is not node:
            self.handed[node] = written
            memory.names.append(node)

    def _drop_what_nobody_reads(self) -> None:
        rewritten = {id(name.memory): name.memory for name in self.names.values() if name.memory.version}
        ours = {node for memory in rewritten.values() for node in memory.names}
        for node in reversed(list(self.graph.nodes)):
            if node in ours and node.op == "call_function" and not node.users:
                self.graph.erase_node(node)


def _part_written(write: Node) -> tuple[Any, ...]:
    """Return the tensor that ``write`` writes into, and the arguments of each view that cut the part."""
    part: Any = write.args[0]
    cuts: list[Any] = []
    while isinstance(part.args[0] if part.args else None, Node) and _is_view(part, part.args[0]):
        if scatters(part):
            cuts.append((part.target, part.args[1:]))
        part = part.args[0]
    return part, *cuts


def _functional_overload(node: Node) -> OpOverload | None:
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return None
    name, overload = target._schema.name.removeprefix("aten::"), target._overloadname
    if not target._schema.is_mutable or not name.endswith("_"):
        return None
    packet = getattr(ATEN, name.removesuffix("_"), None)
    return getattr(packet, overload, None) if packet is not None else None


def _is_view(node: Node, source: Node) -> bool:
    """Return whether ``node``, which reads ``source``, shares memory with it."""
    ours, theirs = _storage_of(node), _storage_of(source)
    if ours is not None and theirs is not None:
        return bool(ours == theirs)
    return isinstance(node.target, OpOverload) and _is_view_op(node.target)


def _is_view_op(target: OpOverload) -> bool:
    schema: Any = target._schema
    return not schema.is_mutable and any(result.alias_info is not None for result in schema.returns)


def _storage_of(node: Node) -> Any:
    """Return a key that is equal for example values in the same memory; None if there is no single memory."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    tensors = [item for item in values if isinstance(item, Tensor)]
    storages = {tensor.untyped_storage()._cdata for tensor in tensors}
    return storages.pop() if len(tensors) == len(values) and len(storages) == 1 else None
