"""Makes in-place ops on intermediate values out of place; ``x += y`` becomes ``x + y``, as FX traced it.

A converted graph has a dequantize per consumer, and a lowered one has integers: only one consumer would see a
write into one of these. So later readers of the value read the result of the op instead, also if they read it
through a view that was written into, or through a view of the written value. A write into a view becomes an
op that returns the base with that part replaced (``select_scatter``, ``slice_scatter``, ...). An ``out=``
argument is written into as by ``copy_``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from torchq_compat.capture.origins import meta_outside_leaves
from torchq_compat.capture.writes.out_arguments import write_results_into_out
from torchq_compat.capture.writes.whole_of_view import (
    are_alike,
    is_same_view,
    is_whole,
    scatters,
    whole_of_view,
)
from torchq_compat.support.upstream import OpOverload, pytree

__all__ = ["make_out_of_place"]

ATEN = torch.ops.aten
#: Ops that return a view of their input if its memory allows it, and a copy otherwise.
MAY_COPY = (
    ATEN.contiguous.default,
    ATEN.flatten.using_ints,
    ATEN.ravel.default,
    ATEN.reshape.default,
    ATEN.reshape_as.default,
    ATEN.to.device,
    ATEN.to.dtype,
    ATEN.to.dtype_layout,
    ATEN.to.other,
)


def make_out_of_place(graph_module: GraphModule, *, keep_writes_into_views: bool = False) -> None:
    """Rewrite the in-place ops of ``graph_module`` out of place.

    The new value of a float buffer or input is copied into it; writes into counters stay in place.

    Args:
        keep_writes_into_views: keep writes into values that have views.

    Raises:
        CaptureError: an op writes into a view that has no out-of-place form, such as one of
            ``Tensor.unfold``.
    """
    write_results_into_out(graph_module.graph)
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
        is_made_here = name.memory.home.op not in ("placeholder", "get_attr")
        if self.keep_writes_into_views:
            is_seen_twice = name.parent is not None or any(_is_view(user, written) for user in written.users)
            return not is_made_here or is_seen_twice
        value = node.meta.get("val")
        return not is_made_here and not (isinstance(value, Tensor) and value.is_floating_point())

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
    if ours is not None and ours == theirs:
        return True
    if not isinstance(node.target, OpOverload):
        return False
    # Example values of an inlined block do not share memory, so inspect the op; an op that may copy is run.
    return _is_view_op(node.target) and not (node.target in MAY_COPY and _copies(node))


def _copies(node: Node) -> bool:
    args, kwargs = pytree.tree_map_only(
        Node, lambda each: each.meta.get("val"), (node.args, dict(node.kwargs))
    )
    try:
        made = node.target(*args, **kwargs)  # type: ignore[operator]
    except (RuntimeError, TypeError, ValueError):
        return True
    return bool(made.untyped_storage()._cdata != args[0].untyped_storage()._cdata)


def _is_view_op(target: OpOverload) -> bool:
    schema: Any = target._schema
    return not schema.is_mutable and any(result.alias_info is not None for result in schema.returns)


def _storage_of(node: Node) -> Any:
    """Return a key that is equal for example values in the same memory; None if there is no single memory."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    tensors = [each for each in values if isinstance(each, Tensor)]
    storages = {each.untyped_storage()._cdata for each in tensors}
    return storages.pop() if len(tensors) == len(values) and len(storages) == 1 else None
