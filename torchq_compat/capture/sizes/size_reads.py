"""Lets a model's Python read sizes that stay free in the captured graph."""

from __future__ import annotations

import itertools
import math
import operator
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.fx.node import map_arg

from torchq_compat.capture.replaced_calls import ReplacedCalls
from torchq_compat.capture.sizes.integer_arguments import first_call, write_integers
from torchq_compat.capture.sizes.numbers import (
    UNKNOWN,
    CodePlace,
    Computed,
    DependsOnValuesError,
    Operation,
    Size,
    asserted_value,
    called_aside,
    followed,
    in_terms_of,
    is_followed,
    place_in_code,
    plain,
    sizes_in,
    stack_in_code,
    users_frames,
)
from torchq_compat.capture.unseen_python import with_globals
from torchq_compat.ops import is_pure, written_by
from torchq_compat.support import metadata
from torchq_compat.support.graph_nodes import behind, nodes_behind
from torchq_compat.support.metadata import CUSTOM
from torchq_compat.support.process_state import held, own_attribute
from torchq_compat.support.upstream import OpOverload, disable_current_modes, is_free, pytree

# Indices with slices, part by part: torch drops a slice that keeps the whole of the example.


ATEN = torch.ops.aten


def has_slices(index: Any) -> bool:
    """Return whether ``index`` cuts a dimension, or holds a number that was computed from sizes."""
    parts = index if isinstance(index, tuple) else (index,)
    slices = [part for part in parts if isinstance(part, slice)]
    bounds = [bound for part in slices for bound in (part.start, part.stop, part.step)]
    if any(isinstance(bound, (Tensor, torch.SymInt)) and not is_followed(bound) for bound in bounds):
        return False  # It depends on values; torch keeps such a cut.
    return any(bound is not None for bound in bounds) or any(map(is_followed, parts))


def is_basic(index: Any) -> bool:
    """Return whether ``index`` selects a view."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(
        _is_number(part) or part is None or part is Ellipsis or isinstance(part, slice) for part in parts
    )


def sliced(tensor: Tensor, index: Any) -> tuple[Tensor, tuple[Any, ...] | None]:
    """Return the part of ``tensor`` that the slices and integers of ``index`` select, one operator for each,
    as torch does, and the index of tensors that is left; None if none is."""
    parts = _without_ellipsis(list(index) if isinstance(index, tuple) else [index], tensor.dim())
    dim, remaining, is_plain = 0, list[Any](), True
    for part in parts:
        if _is_number(part):
            tensor = ATEN.select.int(tensor, dim, part)
            continue
        if part is None:
            tensor = ATEN.unsqueeze.default(tensor, dim)
        elif isinstance(part, slice) and part != slice(None):
            step = () if part.step is None else (part.step,)
            tensor = ATEN.slice.Tensor(tensor, dim, part.start, part.stop, *step)
        is_plain = is_plain and (part is None or isinstance(part, slice))
        remaining.append(slice(None) if part is None or isinstance(part, slice) else part)
        dim += _rank_of(remaining[-1])
    return tensor, None if is_plain else tuple(remaining)


def _is_number(part: Any) -> bool:
    return isinstance(part, (int, torch.SymInt)) and not isinstance(part, bool)


def _without_ellipsis(parts: list[Any], rank: int) -> list[Any]:
    at = next((index for index, part in enumerate(parts) if part is Ellipsis), None)
    if at is None:
        return parts
    taken = sum(_rank_of(part) for part in parts if part is not None and part is not Ellipsis)
    return [*parts[:at], *[slice(None)] * (rank - taken), *parts[at + 1 :]]


def _rank_of(part: Any) -> int:
    is_mask = isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8)
    return part.dim() if is_mask else 1


# Lets a model's Python read sizes that stay free in the captured graph.
#
# ``torch.export`` captures the model with static sizes. While its ``forward`` runs, ``SizeReads`` answers
# each read of a size with a number that knows where it comes from (``followed_numbers``). Where such a
# number is an argument of an operator, its computation is written into the graph in place of the example's
# value; what Python decides by it becomes a guard. Operators run on plain integers, so no size is ever a
# symbol.


#: Functions of torch whose Python only checks sizes: the operator behind it checks them again.
ONLY_CHECK = (F.batch_norm, F.instance_norm, F.group_norm)
ASKS_FOR_OVERRIDES = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
#: How many parts an operator splits a size into: given the size, and the operator's argument.
PARTS_OF_SIZE = Operation(lambda size, item: max(1, -(-size // item)), "max(1, -(-{} // {}))")
PARTS = Operation(
    lambda size, count: max(1, -(-size // max(1, -(-size // count)))),
    "max(1, -(-{0} // max(1, -(-{0} // {1}))))",
)
_CURRENT: ContextVar[SizeReads | None] = ContextVar("torchq_compat_size_reads", default=None)
#: Returns the flat results of a call for its tensors, of which only the shapes are read, and its sizes.
ShapesOfCall = Callable[[list[Tensor], list[int]], list[Tensor]]


@dataclass(frozen=True)
class ReadSizes:
    """What a model's Python asked of sizes, in terms of the nodes of a copy of the trace.

    Attributes:
        inputs: the placeholder of each input of the model; None for one that is no tensor.
        guards: what it decided by sizes.
        known: node -> the expressions of its sizes, for results of custom modules.
        calls: node of a call of a custom module -> what computes the shapes of its results.
    """

    inputs: tuple[Node | None, ...] = ()
    guards: tuple[Guard, ...] = ()
    known: Mapping[Node, tuple[Any, ...]] = field(default_factory=dict)
    calls: Mapping[Node, ShapesOfCall] = field(default_factory=dict)

    def and_also(self, other: ReadSizes) -> ReadSizes:
        """Return what was asked in either trace, in terms of the inputs of ``other`` if it has any."""
        if not self.inputs or not other.inputs:
            return self if self.inputs else other
        nodes = dict(zip(self.inputs, other.inputs, strict=True))
        guards = (replace(g, expression=in_terms_of(g.expression, nodes)) for g in self.guards)
        known = {
            node: tuple(in_terms_of(size, nodes) for size in sizes) for node, sizes in self.known.items()
        }
        calls = {**self.calls, **other.calls}
        return ReadSizes(other.inputs, (*guards, *other.guards), {**known, **other.known}, calls)


@dataclass(frozen=True)
class Guard:
    """What Python asked for: from there on the graph is right only where ``expression`` has ``value``.

    Attributes:
        place: the user's line that asked.
    """

    expression: Any
    value: Any
    place: CodePlace


def current_reads() -> SizeReads | None:
    """Return the mode that answers reads of sizes during this capture; None outside of one."""
    return _CURRENT.get()


class SizeReads(ReplacedCalls):
    """Answers reads of sizes while a model is captured.

    Args:
        follow: if False, each read is answered with a plain integer, and fixes that size.

    Attributes:
        asked: whose values were asked for.
        guards: the guards, by expression and value.
        read: the guards after the trace.
    """

    def __init__(self, *, follow: bool = True) -> None:
        super().__init__()
        self.follow = follow
        self._knows_values = False
        self._constants: Mapping[str, Tensor] = {}
        self.read = ReadSizes()
        self._forget()

    def _forget(self) -> None:
        """Forget the traces before."""
        self.guards: dict[Any, Guard] = {}
        #: What modules that are called whole decided since one's results were last known.
        self._apart: dict[Any, Guard] = {}
        self._calls: dict[Node, ShapesOfCall] = {}
        self._known: dict[int, tuple[Tensor, tuple[Any, ...]]] = {}
        self._nodes_of: dict[Any, Node] = {}
        self._results: dict[int, Any] = {}
        #: Node of a tensor of the model -> its value, and what stands for its memory.
        self._values: dict[Node, tuple[Tensor, Any]] = {}
        self._written: set[Any] = set()
        self.asked: set[Any] = set()
        self._decided: dict[tuple[str, Any], None] = {}
        self._inside: list[Callable[..., Any]] = []
        self._inputs: tuple[Node | None, ...] = ()
        self._tracer: Any = None

    @contextmanager
    def during(self, model: nn.Module, *, with_values: bool = False) -> Iterator[None]:
        """Be active while ``model`` runs.

        Args:
            with_values: whether values of buffers, and of parameters in evaluation, are answered too.
        """
        self._knows_values, self._constants = with_values, _constants(model)
        with super().during(model):
            yield

    @contextmanager
    def inside(self, traced: nn.Module, args: Any, kwargs: Any) -> Iterator[None]:
        """Read sizes of the arguments and of what is computed from them, in the trace that runs."""
        mode: Any = get_proxy_mode()
        if mode is None:
            yield
            return
        self._forget()
        self._tracer = mode.tracer
        inputs = pytree.tree_leaves((args, kwargs))
        self._inputs = tuple(self._slot(leaf) if isinstance(leaf, Tensor) else None for leaf in inputs)
        for name, fake in _constants(traced).items():
            if name in self._constants and (node := self._slot(fake)) is not None:
                self._values[node] = self._constants[name], fake.untyped_storage()._cdata
        dispatch = mode.__torch_dispatch__

        def dispatch_with_plain_numbers(func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            return self._dispatched(dispatch, func, kinds, args, kwargs or {})

        # The tracing mode of this one export: no function of torch itself is replaced.
        dispatching = own_attribute(mode, "__torch_dispatch__", dispatch_with_plain_numbers)
        try:
            with dispatching, held(_CURRENT, self), self:
                yield
        finally:
            # A trace that failed before this one may have had guards.
            self.read = self._snapshot() if self.guards else ReadSizes()
            for number, node in enumerate(self._nodes_returned()):
                node.meta[CUSTOM] = {**(node.meta.get(CUSTOM) or {}), metadata.SIZES_ASKED.name: number}

    def returned(self, result: Any) -> Any:
        """Return the model's ``result`` with plain numbers, and remember those that were computed."""
        leaves, spec = pytree.tree_flatten(result)
        self._results = {i: leaf.node.expression for i, leaf in enumerate(leaves) if is_followed(leaf)}
        if not self._results:
            return result
        return pytree.tree_unflatten([plain(leaf) for leaf in leaves], spec)

    def write_results(self, captured: GraphModule) -> None:
        """Compute the numbers that the model returns in the ``captured`` graph, note what was decided, and
        drop what torch asserts of values at the sizes of the example."""
        metadata.VALUES_DECIDED.write(captured, tuple(self._decided))
        for node in captured.graph.find_nodes(op="call_function", target=ATEN._assert_scalar.default):
            captured.graph.erase_node(node)
        if not self._results:
            return
        by_number = {
            custom[metadata.SIZES_ASKED.name]: node
            for node in captured.graph.nodes
            if metadata.SIZES_ASKED.name in (custom := node.meta.get(CUSTOM) or {})
        }
        nodes = {traced: by_number[number] for number, traced in enumerate(self._nodes_returned())}
        output = captured.graph.output_node()
        results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
        self._nodes_of = {}
        with captured.graph.inserting_before(output):
            for index, expression in self._results.items():
                results[index] = self._node_of(in_terms_of(expression, nodes), output)
        output.args = (tuple(results),)
        captured.recompile()

    def _nodes_returned(self) -> list[Node]:
        sizes = (size for expression in self._results.values() for size in sizes_in(expression))
        return list(dict.fromkeys(size.node for size in sizes))

    def _snapshot(self) -> ReadSizes:
        """Return a copy of the trace, dead code included, with what was asked of it."""
        graph, twins = Graph(), dict[Any, Any]({None: None})
        for node in self._tracer.graph.nodes:
            twins[node] = graph.node_copy(node, twins.__getitem__)
        known = {}
        for tensor, sizes in self._known.values():
            if (node := self._slot(tensor)) is not None:
                expressions = map(_expression, sizes)
                known[twins[node]] = tuple(in_terms_of(item, twins) for item in expressions)
        guards = (replace(g, expression=in_terms_of(g.expression, twins)) for g in self.guards.values())
        inputs = tuple(None if node is None else twins[node] for node in self._inputs)
        calls = {twins[node]: compute for node, compute in self._calls.items()}
        return ReadSizes(inputs, tuple(guards), known, calls)

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (handler := READS.get(function)) is not None:
            return handler(self, function, *args, **kwargs)
        if (
            isinstance(function, types.FunctionType)
            and function.__module__.partition(".")[0] == "torch"
            and function not in self._inside
            and function not in ONLY_CHECK
            and any(name in function.__code__.co_names for name in ASKS_FOR_OVERRIDES)
        ):
            # Its own code runs under this mode, which is switched off inside of what it is handed.
            code = with_globals(function, dict.fromkeys(ASKS_FOR_OVERRIDES, lambda *_: False))
            with self:
                return self._called_as(function, lambda: code(*args, **kwargs))
        if get_proxy_mode() is None:
            return called_aside(self, function, args, kwargs)
        return self._called_with_integers(function, args, kwargs)

    def _called_with_integers(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Call a function of torch, which may ask for the value of some of its arguments: these need no guard
        where the operator that it calls can have their computation as argument."""
        before = len(self.guards)
        result = function(*args, **kwargs)
        asked = list(itertools.islice(self.guards, before, None)) if len(self.guards) > before else []
        if asked and (node := first_call(self._slot, result)) is not None:
            numbers = filter(is_followed, pytree.tree_leaves((args, kwargs)))
            left = Counter((number.node.expression, number.node.value) for number in numbers)
            with node.graph.inserting_before(node):
                left.subtract(write_integers(node, args, kwargs, lambda part: self._node_of(part, node)))
            for key in asked:
                if left.get(key, 1) <= 0:
                    del self.guards[key]
        return result

    # Reads.

    def sizes(self, tensor: Tensor) -> tuple[Any, ...]:
        """Return the sizes of ``tensor``; those of a parameter or buffer are plain."""
        if (known := self._known.get(id(tensor))) is not None:
            return known[1]
        values = tuple(torch.Tensor.shape.__get__(tensor))  # type: ignore[attr-defined]
        of_values = (size for size in values if isinstance(size, torch.SymInt) and not is_followed(size))
        if not all(map(is_free, of_values)):
            # torch would decide by the sizes of the example that it is computed from.
            raise DependsOnValuesError
        node = self._slot(tensor)
        if node is None or (node.op in ("placeholder", "get_attr") and node not in self._inputs):
            return values
        return tuple(
            size if isinstance(size, torch.SymInt) else followed(self.guard, int(size), node, dim)
            for dim, size in enumerate(values)
        )

    def _shape(self, _function: Any, tensor: Tensor) -> torch.Size:
        return torch.Size(map(self._answer, self.sizes(tensor)))

    def _size(self, _function: Any, tensor: Tensor, dim: Any = None) -> Any:
        return self._shape(_function, tensor) if dim is None else self._answer(self.sizes(tensor)[dim])

    def _answer(self, number: Any) -> Any:
        return number if self.follow or not is_followed(number) else number.node.guard()

    def _numel(self, _function: Any, tensor: Tensor) -> Any:
        return self._answer(math.prod(self.sizes(tensor)))

    def _len(self, function: Any, tensor: Tensor) -> int:
        return int(self.sizes(tensor)[0]) if tensor.dim() else function(tensor)

    def _stride(self, function: Any, tensor: Tensor, *dim: Any, **named: Any) -> Any:
        strides, sizes = tensor.stride(), self.sizes(tensor)
        if tensor.is_contiguous():
            result = tuple(math.prod(sizes[index + 1 :]) for index in range(len(sizes)))
        else:
            result = tuple(strides)
            for size in sizes:
                int(size)
        given = (*dim, *named.values())
        return result[given[0]] if given else result

    def _data(self, function: Any, tensor: Tensor) -> Tensor:
        """``detach()`` is the same tensor in a graph, where ``data`` becomes a constant without values."""
        data: Tensor = function(tensor) if get_proxy_mode() is None else tensor.detach()
        return data

    def _iter(self, _function: Any, tensor: Tensor) -> Iterator[Any]:
        return iter(self._unbind(torch.Tensor.unbind, tensor))

    def _contiguous(self, function: Any, tensor: Tensor, **named: Any) -> Tensor:
        """Keep the call: torch drops it if the example happens to be contiguous."""
        if not self._is_traced(tensor):
            return function(tensor, **named)  # type: ignore[no-any-return]
        result: Tensor = self._called_as(function, lambda: ATEN.contiguous.default(tensor, **named))
        return result

    def _new_tensor(self, function: Any, tensor: Tensor, data: Any, **named: Any) -> Tensor:
        """``torch.tensor`` of a number that was computed from sizes is an operator; this is a constant."""
        if not any(map(is_followed, pytree.tree_leaves(data))):
            return function(tensor, data, **named)  # type: ignore[no-any-return]
        return torch.tensor(data, **{"dtype": tensor.dtype, "device": tensor.device, **named})

    def _squeeze(self, function: Any, tensor: Tensor, *dim: Any, **named: Any) -> Any:
        """The rank of the result is decided by whether sizes are 1."""
        sizes = self.sizes(tensor)
        given = (*dim, *named.values())
        dims = given[0] if given else range(len(sizes))
        for item in (dims,) if isinstance(dims, int) else dims:
            if isinstance(item, int) and -len(sizes) <= item < len(sizes):
                bool(sizes[item] == 1)
        return function(tensor, *dim, **named)

    def _parts(self, function: Any, tensor: Tensor, value: Any, *dim: Any, **named: Any) -> Any:
        """Split a tensor: Python sees how many parts there are."""
        result, sizes = function(tensor, value, *dim, **named), self.sizes(tensor)
        size = sizes[next(iter((*dim, *named.values())), 0)]
        if is_followed(size) and not isinstance(value, (list, tuple)):
            given = value.node.expression if is_followed(value) else value
            parts = PARTS if function.__name__.endswith("chunk") else PARTS_OF_SIZE
            self.guard(Computed(parts, (size.node.expression, given)), len(result))
        return result

    def _unbind(self, function: Any, tensor: Tensor, *dim: Any, **named: Any) -> Any:
        int(self.sizes(tensor)[next(iter((*dim, *named.values())), 0)])
        return function(tensor, *dim, **named)

    # Indices.

    def _getitem(self, function: Any, tensor: Tensor, index: Any) -> Any:
        if not self._is_traced(tensor) or not has_slices(index):
            return function(tensor, index)

        def read() -> Tensor:
            view, remaining = sliced(tensor, index)
            return view if remaining is None else view[remaining]

        return self._called_as(function, read)

    def _setitem(self, function: Any, tensor: Tensor, index: Any, value: Any) -> None:
        is_longer = isinstance(value, Tensor) and value.shape[:1] == (1,) and is_basic(index)
        if not self._is_traced(tensor) or not (is_longer or has_slices(index)):
            function(tensor, index, value)
            return
        view, remaining = sliced(tensor, index)
        while is_longer and value.dim() > view.dim() and bool(self.sizes(value)[0] == 1):
            # torch views the value by the sizes of the example.
            value = ATEN.select.int(value, 0, 0)
        function(view, ... if remaining is None else remaining, value)

    def _bool(self, function: Any, tensor: Tensor) -> bool:
        """A value that the model only asserts is what it should be, as the run on the example showed."""
        asserted = None
        if self._is_traced(tensor):
            asserted = asserted_value(next(users_frames(sys._getframe(1)), None))
        if asserted is None:
            return bool(function(tensor))
        self._decided[place_in_code().line or "", None] = None
        return asserted

    # Calls.

    def _called_as(self, function: Any, call: Callable[[], Any]) -> Any:
        """Return ``call()``, whose nodes count as made by ``function``."""
        is_outermost = not self._inside
        self._inside.append(function)
        if is_outermost:
            counts = self._tracer.torch_fn_counts
            counts[function] = counts.get(function, 0) + 1
        try:
            return call()
        finally:
            self._inside.pop()

    def remember(self, tensor: Tensor, sizes: tuple[Any, ...]) -> None:
        """Answer reads of the sizes of ``tensor`` with ``sizes``, if any is computed from others."""
        if any(isinstance(size, torch.SymInt) for size in sizes):
            self._known[id(tensor)] = (tensor, sizes)

    # Modules that are called whole.

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Let Python decide by sizes at each call, as that of a module that is called whole does: what it
        decides here guards nothing."""
        with own_attribute(self, "guards", self._apart):
            yield

    def decide_unseen(self) -> None:
        """Take it that a module decided by sizes, whose Python ran on values."""
        self._apart[UNKNOWN, None] = Guard(UNKNOWN, None, CodePlace())

    def know_results(
        self,
        results: list[Tensor],
        like: list[Tensor],
        compute: ShapesOfCall | None,
        *,
        has_constants: bool,
    ) -> bool:
        """Answer reads of the sizes of the ``results`` of a call of a module, and return whether the module's
        Python decided nothing by sizes.

        Args:
            like: tensors of their shapes, whose sizes they have if the module decided nothing by sizes.
            compute: computes their shapes at any other sizes; None if these depend on values.
            has_constants: whether the module returns numbers, too, which are constants of the graph.
        """
        decided = list(self._apart.values())
        self._apart.clear()
        by_user = next((guard.place for guard in decided if guard.place.by_user), None)
        for result, item in zip(results, like, strict=True):
            node = self._slot(result)
            if node is None:
                continue
            if compute is not None:
                self._calls[node.all_input_nodes[0]] = compute
            if not decided:
                sizes = self.sizes(item)
                if not any(UNKNOWN in sizes_in(size.node.expression) for size in sizes if is_followed(size)):
                    self.remember(result, sizes)
            elif by_user is not None or has_constants:
                # Nothing shows what Python decides by how many dimensions a result has.
                rank, value = Size(node, None), result.dim()
                self.guards[rank, value] = Guard(rank, value, by_user or CodePlace())
        return not decided

    # The trace.

    def _is_traced(self, tensor: Tensor) -> bool:
        return self._slot(tensor) is not None and get_proxy_mode() is not None

    def _slot(self, tensor: Any) -> Node | None:
        slot: Any = get_proxy_slot(tensor, self._tracer, None)
        return None if slot is None else slot.proxy.node

    def guard(self, expression: Any, value: Any) -> None:
        key = (expression, value)
        if key not in self.guards and any(sizes_in(expression)):
            self.guards[key] = Guard(expression, value, place_in_code())

    def _dispatched(self, dispatch: Any, func: Any, kinds: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator on plain numbers, and write their expressions into the node that it made."""
        if func is ATEN.item.default and (value := self._value_asked(args[0])) is not None:
            return value
        if self._knows_values and isinstance(func, OpOverload) and func._schema.is_mutable:
            self._note_writes(func, args, kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        numbers = {index: leaf for index, leaf in enumerate(leaves) if is_followed(leaf)}
        graph: Graph = self._tracer.graph
        last = next(iter(reversed(graph.nodes)), None)
        if numbers:
            args, kwargs = pytree.tree_unflatten([plain(leaf) for leaf in leaves], spec)
        # ``Variable(tensor)`` comes here without a call that the mode sees, and leaves it on.
        with torch._C.DisableTorchFunction():
            result = dispatch(func, kinds, args, kwargs)
        built = graph.nodes if last is None else nodes_behind(last)
        node, stack = None, stack_in_code()
        for item in built:
            item.meta.setdefault("stack_trace", stack)
            if self._inside and item.op == "call_function":
                called = self._inside[0]
                name = f"{called.__name__}_{self._tracer.torch_fn_counts[called]}"
                item.meta["torch_fn"] = name, f"{type(called).__name__}.{called.__name__}"
            if node is None and item.target is func:
                node = item
        if numbers:
            self._write(node, numbers)
        return result

    def _value_asked(self, tensor: Tensor) -> Any:
        """Return the number in ``tensor`` if it is computed of buffers alone, and answered; else None."""
        node = self._slot(tensor)
        needed = set(behind([node]))
        roots = {item for item in needed if item.op != "call_function"}
        for item in roots - self._values.keys():
            constant = getattr(self._tracer.root, str(item.target), None) if item.op == "get_attr" else None
            if isinstance(constant, Tensor):
                self._values[item] = constant, item
        storages = {self._values[item][1] for item in roots & self._values.keys()}
        if not needed or len(storages) < len(roots) or storages & self._written:
            return None
        if not all(item in roots or is_pure(item) or item.target is operator.getitem for item in needed):
            return None
        self.asked |= storages or {0}
        if not self._knows_values:
            return None
        values: dict[Node, Any] = {item: self._values[item][0] for item in roots}
        with torch.no_grad(), disable_current_modes(), torch._C.DisableTorchFunction():
            for item in self._tracer.graph.nodes:
                if item in needed - roots:
                    args, kwargs = map_arg((item.args, item.kwargs), values.__getitem__)
                    values[item] = item.target(*args, **kwargs)
            value = values[node].item()  # type: ignore[index]
        self._decided[place_in_code().line or "", value] = None
        return value

    def _note_writes(self, func: OpOverload, args: Any, kwargs: Any) -> None:
        for value in written_by(func, args, kwargs):
            if isinstance(value, Tensor):
                self._written.add(value.untyped_storage()._cdata)
                self._written.update(behind([self._slot(value)]))
        if self.asked & self._written:
            raise RuntimeError("the model decides by a buffer that it changes")

    def _write(self, node: Node | None, numbers: dict[int, Any]) -> None:
        leaves, spec = pytree.tree_flatten(() if node is None else (node.args, node.kwargs))
        if node is None or any(leaves[index : index + 1] != [plain(n)] for index, n in numbers.items()):
            for number in numbers.values():
                number.node.guard()
            return
        with node.graph.inserting_before(node):
            for index, number in numbers.items():
                leaves[index] = self._node_of(number.node.expression, node)
        node.args, node.kwargs = pytree.tree_unflatten(leaves, spec)

    def _node_of(self, expression: Any, like: Node) -> Any:
        """Return the node that computes ``expression``, made in front of ``like`` if it is new."""
        if expression in self._nodes_of:
            return self._nodes_of[expression]
        if isinstance(expression, Size):
            result = like.graph.call_function(ATEN.sym_size.int, (expression.node, expression.dim))
            value: Any = expression.value
        elif isinstance(expression, Computed):
            parts = [self._node_of(operand, like) for operand in expression.operands]
            result = like.graph.call_function(expression.operation.function, tuple(parts))
            value = expression.operation.function(
                *(part.meta["val"] if isinstance(part, Node) else part for part in parts)
            )
        else:
            return expression
        kept = ("nn_module_stack", "stack_trace", "torch_fn")
        result.meta.update({key: like.meta[key] for key in kept if key in like.meta}, val=value)
        self._nodes_of[expression] = result
        return result


def _expression(size: Any) -> Any:
    """Return the expression of ``size``; 1 for one that depends on values, as if all lengths were 1."""
    if is_followed(size):
        return size.node.expression
    return size if type(size) is int else 1


def _constants(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of ``model`` whose values may be answered: in training no parameters."""
    parameters = {} if model.training else dict(model.named_parameters(remove_duplicate=False))
    return {**parameters, **dict(model.named_buffers(remove_duplicate=False))}


#: The functions by which Python reads sizes.
READS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.shape.__get__: SizeReads._shape,  # type: ignore[attr-defined]
    **dict.fromkeys((torch.Tensor.size, ATEN.sym_size, ATEN.sym_size.int), SizeReads._size),
    torch.Tensor.data.__get__: SizeReads._data,  # type: ignore[attr-defined]
    **dict.fromkeys((torch.numel, torch.Tensor.numel, torch.Tensor.nelement), SizeReads._numel),
    torch.Tensor.__len__: SizeReads._len,
    torch.Tensor.__bool__: SizeReads._bool,
    torch.Tensor.stride: SizeReads._stride,
    torch.Tensor.__iter__: SizeReads._iter,
    torch.Tensor.contiguous: SizeReads._contiguous,
    torch.Tensor.new_tensor: SizeReads._new_tensor,
    **dict.fromkeys((torch.squeeze, torch.Tensor.squeeze, torch.Tensor.squeeze_), SizeReads._squeeze),
    **dict.fromkeys((torch.split, torch.Tensor.split), SizeReads._parts),
    **dict.fromkeys((torch.unsafe_split, torch.Tensor.unsafe_split), SizeReads._parts),
    **dict.fromkeys((torch.chunk, torch.Tensor.chunk), SizeReads._parts),
    **dict.fromkeys((torch.unsafe_chunk, torch.Tensor.unsafe_chunk), SizeReads._parts),
    **dict.fromkeys((torch.unbind, torch.Tensor.unbind), SizeReads._unbind),
    torch.Tensor.__getitem__: SizeReads._getitem,
    torch.Tensor.__setitem__: SizeReads._setitem,
}
