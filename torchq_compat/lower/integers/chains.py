"""Operators of a lowered graph that run one after the other, as one call of C++ (``operator_chains.h``).

Between two operators Python and torch's dispatcher take as long as a small kernel. The graph of a model, its
code and what other tools see stay as they are: chains are how plain calls on the CPU run it.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from torchq_compat.capture.loops.loop_module import LoopForm
from torchq_compat.capture.opaque_calls import BoundCall, OpaqueModule
from torchq_compat.lower.integers.operators import DEQUANTIZE
from torchq_compat.recurrent.kernel.build import OF_LIBRARY
from torchq_compat.recurrent.kernel.op import (
    NAMESPACE,
    OPS,
    WORK_PER_THREAD,
    drop_forgotten,
    forget,
    kernel_operator,
)
from torchq_compat.support.dtypes import dtype_name
from torchq_compat.support.upstream import OpOverload, are_operators_watched

ATEN = torch.ops.aten
#: The own operators that a chain can have.
OWN = frozenset(
    ("quantize", "dequantize", "lookup", "arithmetic", "affine", "mean", "max_pool", "convolution", "linear")
)
#: The fewest operators that are worth a chain, and the most arguments of one.
LEAST, MOST_ARGUMENTS = 3, 16
#: How many calls may fail with chains and not without, until there are none.
MOST_FAILURES = 16
#: Marks a call of a module that is to return a ticket, see ``OpaqueModule.opaque_ticket``.
TICKET = "ticket"
#: Type in a schema of torch -> its kind in the text of a chain.
KINDS = {"Tensor": "T", "int": "I", "SymInt": "I", "float": "F", "bool": "B"}
KINDS |= {"List[int]": "S", "List[SymInt]": "S", "List[Tensor]": "L", "ScalarType": "D", "str": "W"}
DTYPES = (torch.float32, torch.float64, torch.int64, torch.int32, torch.bool)
#: Operator of a number, for which a chain has no type -> the same of a tensor.
OF_TENSORS = {
    ATEN.masked_fill.Scalar: ATEN.masked_fill.Tensor,
    **{
        getattr(ATEN, name).Scalar: getattr(ATEN, name).Tensor
        for name in ("eq", "ne", "lt", "le", "gt", "ge", "mul", "div")
    },
}
#: Sum -> the sign of its second operand, and whether that is the first in the schema.
SUMS: dict[Any, tuple[int, bool]] = {
    ATEN.add.Tensor: (1, False),
    ATEN.add.Scalar: (1, False),
    ATEN.sub.Tensor: (-1, False),
    ATEN.sub.Scalar: (-1, False),
    ATEN.rsub.Scalar: (-1, True),
    ATEN.rsub.Tensor: (-1, True),
}


Forward = Callable[..., Any]


class PlainForward:
    """``forward`` for plain calls on the CPU: from the second call on with chains.

    Args:
        graph: the lowered graph.
        direct: its ``forward``.
        compiled: makes ``forward`` of another graph, on the state of a model.
    """

    def __init__(self, graph: Graph, direct: Forward, compiled: Callable[[Graph, Any], Forward]) -> None:
        self._graph, self._direct, self._compiled = graph, direct, compiled
        #: Whether there may be gradients -> ``forward`` with chains.
        self._chained: dict[bool, Forward] = {}
        self._loop: ChainedLoop | None = None
        self._is_first, self._failures = True, 0

    def __call__(self, model: Any, args: tuple[Any, ...]) -> Any:
        if are_operators_watched():
            return self._direct(model, *args)
        has_gradients = torch.is_grad_enabled()
        chained = self._chained.get(has_gradients)
        if chained is None:
            if self._is_first or not hasattr(OPS, OF_LIBRARY):
                self._is_first = False
                return self._direct(model, *args)
            chained = self._optional(self._with_chains, model, not has_gradients) or self._direct
            self._chained[has_gradients] = chained
        try:
            return chained(model, *args)
        except (RuntimeError, IndexError):
            result = self._direct(model, *args)  # It fails too, and says where.
            self._failures += 1
            if self._failures > MOST_FAILURES:
                self._chained = dict.fromkeys((False, True), self._direct)
            return result

    def loop(self, model: Any, form: LoopForm, args: tuple[Tensor, ...], wholes: Sequence[Tensor]) -> Any:
        """Run the model as the step of a loop of ``form``, in one call; None if it is not one chain.

        Args:
            args: of the first step.
            wholes: see ``run_steps``.
        """
        if are_operators_watched() or not hasattr(OPS, OF_LIBRARY):
            return None
        if self._loop is None:
            self._loop = self._optional(self._with_loop, model, form) or ChainedLoop()
        return self._optional(self._loop.run, model, form, args, wholes)

    def _with_chains(self, model: Any, sums: bool) -> Forward:
        return self._compiled(self._own(*with_chains(self._graph, sums=sums)), model)

    def _with_loop(self, model: Any, form: LoopForm) -> ChainedLoop:
        graph = self._own(*with_chains(self._graph, sums=True, least=1))
        return ChainedLoop.of(graph, form, lambda given: self._compiled(given, model))

    def _own(self, graph: Graph, numbers: Sequence[int]) -> Graph:
        """Return ``graph``, whose chains are forgotten with this object."""
        for number in numbers:
            weakref.finalize(self, forget, number, "forget_chain").atexit = False
        drop_forgotten()
        return graph

    @staticmethod
    def _optional(function: Callable[..., Any], *args: Any) -> Any:
        """Return a result, or None for an error: what only takes less time is no reason for one."""
        try:
            return function(*args)
        except Exception:
            return None


@dataclass(frozen=True)
class ChainedLoop:
    """A loop whose step is one chain.

    Attributes:
        given: returns the tensors and sizes that the chain is given, for the arguments of a step; None: the
            step is not one chain.
        chain: its number.
        roles, outputs: see ``Loop`` in ``operator_chains.h``.
    """

    given: Forward | None = None
    chain: int = 0
    roles: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()

    @classmethod
    def of(cls, graph: Graph, form: LoopForm, compiled: Callable[[Graph], Forward]) -> ChainedLoop:
        """Return the loop of ``form`` whose step is ``graph``, which has chains."""
        others = [node for node in graph.nodes if node.op in ("call_function", "call_module")]
        chains = [node for node in others if node.target is kernel_operator("run_chain")]
        others = [node for node in others if node not in chains and TICKET not in node.kwargs]
        if len(chains) != 1 or any(not _only_reads(node) for node in others):
            return cls()
        (chain,) = chains
        tensors, sizes, number = chain.args
        read = len(form.parts) - form.counted
        roles = [1 + place for place in range(form.states)] + [-1 - place for place in range(read)]
        role_of = dict(zip(graph.find_nodes(op="placeholder"), roles, strict=False))
        results: Any = graph.output_node().args[0]
        outputs = [
            item.args[1] if item.args[:1] == (chain,) else -1 - tensors.index(item) for item in results
        ]
        given, copies = Graph(graph.owning_module), dict[Node, Node]()
        for node in itertools.takewhile(lambda node: node is not chain, graph.nodes):
            copies[node] = given.node_copy(node, copies.__getitem__)
        given.output(tuple([copies[node] for node in part] for part in (tensors, sizes)))
        return cls(compiled(given), number, tuple(role_of.get(node, 0) for node in tensors), tuple(outputs))

    def run(self, model: Any, form: LoopForm, args: tuple[Tensor, ...], wholes: Sequence[Tensor]) -> Any:
        """Run all steps, see ``PlainForward.loop``."""
        if self.given is None:
            return None
        dims = [-1 - part.dim if part.backward else part.dim for part in form.parts]
        steps, read = wholes[0].shape[form.parts[0].dim], len(wholes) - form.counted
        described = (self.roles, self.outputs, dims[:read], form.stacked)
        given = self.given(model, *args)
        if torch.is_grad_enabled() and any(item.requires_grad for item in (*given[0], *wholes)):
            return None
        return tuple(kernel_operator("run_loop")(*given, self.chain, wholes[:read], steps, *described))


def with_chains(graph: Graph, *, sums: bool, least: int = LEAST) -> tuple[Graph, list[int]]:
    """Return ``graph`` with chains in place of the operators between others, and their numbers.

    Args:
        sums: whether chains have sums of floats, which then have no gradients.
        least: the fewest operators of a chain.
    """
    written = Graph(graph.owning_module)
    written.set_codegen(graph._codegen)
    copies: dict[Node, Node] = {}
    numbers: list[int] = []
    calls = dict(_bound_calls(graph))
    for nodes in _runs(graph, calls, sums=sums):
        if sum(isinstance(item, (_Operator, BoundCall)) for item in nodes.values()) < least:
            for node, item in nodes.items():
                if isinstance(item, BoundCall):
                    x, *states = (copies[node.args[place]] for place in item.places)  # type: ignore[index]
                    arguments = (x, states, _ticket(written, node), item.batch_first, WORK_PER_THREAD)
                    copies[node] = written.call_function(kernel_operator("recurrent_bound"), arguments)
                else:
                    copies[node] = written.node_copy(node, copies.__getitem__)
            continue
        chain = _Chain(nodes)
        numbers.append(OPS.bind_chain.default(chain.text()))
        tickets = [_ticket(written, node) for node in chain.calls]
        tensors, sizes = ([copies[node] for node in part] for part in (chain.tensors, chain.sizes))
        call = written.call_function(kernel_operator("run_chain"), (tensors, [*sizes, *tickets], numbers[-1]))
        for position, node in enumerate(chain.results):
            copies[node] = written.call_function(operator.getitem, (call, position))
    return written, numbers


def _ticket(written: Graph, call: Node) -> Node:
    return written.call_module(str(call.target), _call_of(call), {TICKET: True})


def _bound_calls(graph: Graph) -> Iterator[tuple[Node, BoundCall]]:
    """Yield the calls of modules that are calls of the bound operator."""
    assert graph.owning_module is not None
    for node in graph.find_nodes(op="call_module"):
        module = graph.owning_module.get_submodule(str(node.target))
        if not isinstance(module, OpaqueModule) or any(
            user.target is not operator.getitem for user in node.users
        ):
            continue
        if (call := module.opaque_bound(*_call_of(node))) is not None:
            yield node, call


def _call_of(node: Node) -> tuple[Any, Any]:
    """Return which call of a module ``node`` is, and which results it takes as integers."""
    return node.kwargs["opaque_layout"], node.kwargs.get("leaf_quantized", ())


class _Operator(NamedTuple):
    """An operator as a chain has it, with a kind for each argument; ``overload`` is None if it is own."""

    name: str
    overload: str | None
    arguments: list[tuple[str, Any]]
    returns: int = 1


#: The nodes of a run, and what each is in a chain: None for the items of results.
_Run = dict[Node, "_Operator | BoundCall | None"]


def _runs(graph: Graph, calls: Mapping[Node, BoundCall], *, sums: bool) -> Iterator[_Run]:
    """Yield the nodes in their order, as many as a chain can have, or one alone that none can have. What only
    reads of nodes that are before a chain is put before it."""
    run: _Run = {}
    for node in graph.nodes:
        item = calls.get(node) or _operator_of(node, sums=sums)
        if item is not None or (node.target is operator.getitem and node.args[0] in run):
            run[node] = item
            continue
        if node.target is ATEN._assert_tensor_metadata.default:
            continue  # What the capture was sure of: a plain call has the dtypes that it had.
        if not _only_reads(node) or not run.keys().isdisjoint(node.all_input_nodes):
            yield run
            run = {}
        yield {node: None}


def _only_reads(node: Node) -> bool:
    return node.op in ("placeholder", "get_attr") or node.target is operator.getitem or _is_size(node)


def _operator_of(node: Node, *, sums: bool) -> _Operator | None:
    """Return the operator of ``node`` as a chain has it; None if it cannot have it. See ``with_chains``."""
    if not isinstance(node.target, OpOverload):
        return None
    if node.target.namespace == NAMESPACE:
        arguments = [(KINDS.get(str(item.type), ""), value) for item, value in _arguments(node)]
        name = node.target._opname
        return _Operator(name, None, arguments) if name in OWN else None
    if node.target in SUMS:
        return _sum(node) if sums else None
    target = OF_TENSORS.get(node.target, node.target)
    returned = [str(result.type) for result in target._schema.returns]
    if target.namespace != "aten" or target._schema.is_mutable or len(returned) > MOST_ARGUMENTS:
        return None
    if torch.Tag.nondeterministic_seeded in target.tags or (
        returned != ["List[Tensor]"] and set(returned) != {"Tensor"}
    ):
        return None
    if _has_items(node) and any(user.target is not operator.getitem for user in node.users):
        return None
    values = [value for _, value in _arguments(node)]
    kinds = [_kind(argument, value) for argument, value in zip(target._schema.arguments, values, strict=True)]
    is_known = all(kinds) and len(kinds) <= MOST_ARGUMENTS and _is_of_floats_or_integers(values)
    returns = 0 if returned == ["List[Tensor]"] else len(returned)
    arguments = list(zip(map(str, kinds), values, strict=True))
    return _Operator(target._schema.name, target._overloadname, arguments, returns) if is_known else None


def _sum(node: Node) -> _Operator | None:
    """Return a sum of floats, for whose factor a chain has no type, as an own operator."""
    x, y, factor = (value for _, value in _arguments(node))
    sign, is_reversed = SUMS[node.target]
    operands = [y, x] if is_reversed else [x, y]
    are_floats = all(type(item) in (int, float) or _dtype(item) is torch.float32 for item in operands)
    if not are_floats or type(factor) not in (int, float):
        return None
    return _Operator("plus", None, [("T", operands[0]), ("T", operands[1]), ("F", sign * factor)])


def _dtype(value: Any) -> torch.dtype | None:
    if getattr(value, "target", None) is DEQUANTIZE:
        return torch.float32
    return getattr(value.meta.get("val"), "dtype", None) if isinstance(value, Node) else None


def _is_of_floats_or_integers(values: Sequence[Any]) -> bool:
    """Return whether numbers among operands do not change the dtype of the result, as tensors either."""
    dtypes = [dtype for value in values if (dtype := _dtype(value)) is not None]
    return bool(dtypes and dtypes[0].is_floating_point) or not any(type(value) is float for value in values)


def _has_items(node: Node) -> bool:
    """Return whether the results of ``node`` are several tensors, not one."""
    if not isinstance(node.target, OpOverload):
        return node.op == "call_module"
    return [str(result.type) for result in node.target._schema.returns] != ["Tensor"]


def _arguments(node: Node) -> Iterator[tuple[Any, Any]]:
    """Yield each argument of the schema, and its value."""
    target: Any = node.target
    for index, argument in enumerate(target._schema.arguments):
        given = index < len(node.args)
        yield argument, node.args[index] if given else node.kwargs.get(argument.name, argument.default_value)


def _kind(argument: Any, value: Any) -> str | None:
    """Return the kind of an argument of an operator of torch, as a chain writes it; None if it cannot."""
    if value is None:
        return "N"
    written = str(argument.real_type)  # ``type`` takes dtypes and memory formats for integers.
    is_optional = written.startswith("Optional[")
    kind = KINDS.get(written[9:-1] if is_optional else written)
    if kind is None or not IS_OF_KIND[kind](value):
        return None
    return f"{kind}?" if is_optional else kind


class _Chain:
    """A chain of the nodes of a run.

    Attributes:
        calls: those that call modules.
        tensors, sizes: the nodes whose values it is given; after them, the tickets of its calls.
        results: the nodes of its results.
    """

    def __init__(self, run: _Run) -> None:
        self._steps = {node: item for node, item in run.items() if item is not None}
        self.calls = [node for node, item in run.items() if isinstance(item, BoundCall)]
        values = [node for node in run if not _has_items(node)]
        self._last_reader = {source: node for node in self._steps for source in self._sources(node)}
        given = [source for source in self._last_reader if source not in run]
        self.sizes = [source for source in given if _is_size(source)]
        self.tensors = [source for source in given if not _is_size(source)]
        self.results = [node for node in values if not run.keys() >= node.users.keys()]
        self._places = {node: f"s{place}" for place, node in enumerate([*self.sizes, *self.calls])}
        self._places |= {node: f"t{place}" for place, node in enumerate([*self.tensors, *values])}

    def _sources(self, node: Node) -> list[Any]:
        item = self._steps[node]
        return (
            [node.args[place] for place in item.places]
            if isinstance(item, BoundCall)
            else node.all_input_nodes
        )

    def text(self) -> str:
        """Return the chain as ``Chain`` in ``operator_chains.h`` reads it."""
        unread: dict[Node, list[str]] = {node: [] for node in self._steps}
        for source in self._last_reader.keys() - {*self.sizes, *self.results}:
            unread[self._last_reader[source]].append(self._places[source][1:])
        tensors, sizes = (sum(place[0] == kind for place in self._places.values()) for kind in "ts")
        words: list[Any] = [len(self.tensors), tensors, sizes]
        for node, item in self._steps.items():
            words += self._words_of_call(node, item) if isinstance(item, BoundCall) else self._words_of(item)
            items = [(user.args[1], user) for user in node.users] if _has_items(node) else [(0, node)]
            words += [len(items), *itertools.chain(*((at, self._places[taken][1:]) for at, taken in items))]
            words += [len(unread[node]), *unread[node]]
        words += ["end", *(self._places[node][1:] for node in self.results)]
        return " ".join(map(str, words))

    def _words_of(self, item: _Operator) -> Iterator[Any]:
        """Yield the operator and its arguments; of torch's, how many tensors it returns."""
        is_own = item.overload is None
        yield item.name
        if not is_own:
            yield from (item.overload, len(item.arguments))
        for kind, value in item.arguments:
            if not is_own:
                yield kind
            if is_own or kind != "N":
                yield from self._value(float(value) if kind.startswith("F") and type(value) is int else value)
        if not is_own:
            yield item.returns

    def _words_of_call(self, node: Node, call: BoundCall) -> Iterator[Any]:
        x, *states = self._sources(node)
        yield from ("recurrent", self._places[x], *self._value(states), self._places[node])
        yield from (f"b{int(call.batch_first)}", f"i{WORK_PER_THREAD}")

    def _value(self, value: Any) -> Iterator[str]:
        if isinstance(value, Node):
            yield self._places[value]
        elif isinstance(value, (list, tuple)):
            yield f"n{len(value)}"
            for item in value:
                yield from self._value(item)
        elif isinstance(value, bool):
            yield f"b{int(value)}"
        elif isinstance(value, int):
            yield f"i{value}"
        elif isinstance(value, float):
            yield f"f{value.hex()}"
        elif isinstance(value, torch.dtype):
            yield dtype_name(value)
        else:
            yield str(value).lower().replace(" ", "")


def _is_size(node: Node) -> bool:
    return isinstance(node.meta.get("val"), (int, torch.SymInt))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Node) and isinstance(value.meta.get("val"), (Tensor, type(None)))


def _is_integer(value: Any) -> bool:
    return _is_size(value) if isinstance(value, Node) else type(value) is int


#: Kind -> whether a chain can write a value.
IS_OF_KIND: dict[str, Callable[[Any], bool]] = {
    "T": lambda value: _is_tensor(value) or type(value) in (int, float),
    "D": lambda value: value in DTYPES,
    "W": lambda value: isinstance(value, str),
    "I": _is_integer,
    "F": lambda value: type(value) in (int, float),
    "B": lambda value: type(value) is bool,
    "S": lambda value: isinstance(value, (list, tuple)) and all(map(_is_integer, value)),
    "L": lambda value: isinstance(value, (list, tuple)) and all(map(_is_tensor, value)),
}
