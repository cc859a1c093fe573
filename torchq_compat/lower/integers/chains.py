"""Operators of a lowered graph that run one after the other, as one call of C++ (``operator_chains.h``).

Between two operators Python and torch's dispatcher take as long as a small kernel. The graph of a model, its
code and what other tools see stay as they are: chains are how plain calls on the CPU run it.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from torchq_compat.capture.opaque_calls import BoundCall, OpaqueModule
from torchq_compat.recurrent.kernel.build import OF_LIBRARY
from torchq_compat.recurrent.kernel.op import NAMESPACE, OPS, WITHOUT_GRADIENTS, WORK_PER_THREAD
from torchq_compat.support.process_state import once
from torchq_compat.support.upstream import OpOverload, are_operators_watched

#: The own operators that a chain can have.
OWN = frozenset(
    ("quantize", "dequantize", "lookup", "arithmetic", "affine", "mean", "max_pool", "convolution", "linear")
)
#: The fewest operators that are worth a chain, and the most arguments of one.
LEAST, MOST_ARGUMENTS = 3, 16
#: Marks a call of a module that is to return a ticket, see ``OpaqueModule.opaque_ticket``.
TICKET = "ticket"
#: Type in a schema of torch -> its kind in the text of a chain.
KINDS = {"Tensor": "T", "int": "I", "SymInt": "I", "float": "F", "bool": "B"}
KINDS |= {"List[int]": "S", "List[SymInt]": "S", "List[Tensor]": "L"}


class PlainForward:
    """``forward`` for plain calls on the CPU: from the second call on with chains.

    Args:
        graph: the lowered graph.
        direct: its ``forward``.
        compiled: makes ``forward`` of another graph, on the state of a model.
    """

    def __init__(
        self, graph: Graph, direct: Callable[..., Any], compiled: Callable[[Graph, Any], Callable[..., Any]]
    ) -> None:
        self._graph, self._direct, self._compiled = graph, direct, compiled
        self._chained: Callable[..., Any] | None = None
        self._is_first = True

    def __call__(self, model: Any, args: tuple[Any, ...]) -> Any:
        if are_operators_watched():
            return self._direct(model, *args)
        if self._chained is None:
            if self._is_first or not hasattr(OPS, OF_LIBRARY):
                self._is_first = False
                return self._direct(model, *args)
            self._chained = self._with_chains(model)
        try:
            return self._chained(model, *args)
        except (RuntimeError, IndexError):
            result = self._direct(model, *args)  # It fails too, and says where.
            self._chained = self._direct
            return result

    def _with_chains(self, model: Any) -> Callable[..., Any]:
        try:
            graph, numbers = with_chains(self._graph)
            weakref.finalize(self, _forget, numbers).atexit = False
            return self._compiled(graph, model)
        except Exception:  # A form that is faster is optional.
            return self._direct


def _forget(numbers: Sequence[int]) -> None:
    for number in numbers:
        OPS.forget_chain.default(number)


@once
def _operator() -> Any:
    WITHOUT_GRADIENTS.impl("run_chain", torch.library.fallthrough_kernel, "Autograd")  # type: ignore[no-untyped-call]
    return OPS.run_chain.default


def with_chains(graph: Graph) -> tuple[Graph, list[int]]:
    """Return ``graph`` with chains in place of the operators between others, and their numbers."""
    written = Graph(graph.owning_module)
    written.set_codegen(graph._codegen)
    copies: dict[Node, Node] = {}
    numbers: list[int] = []
    calls = dict(_bound_calls(graph))
    for nodes in _runs(graph, calls):
        if sum(node.target is not operator.getitem for node in nodes) < LEAST:
            for node in nodes:
                copies[node] = written.node_copy(node, copies.__getitem__)
            continue
        chain = _Chain(nodes, calls)
        numbers.append(OPS.bind_chain.default(chain.text()))
        tickets = [
            written.call_module(str(node.target), _call_of(node), {TICKET: True})
            for node in nodes
            if node in calls
        ]
        tensors, sizes = ([copies[node] for node in part] for part in (chain.tensors, chain.sizes))
        call = written.call_function(_operator(), (tensors, [*sizes, *tickets], numbers[-1]))
        for position, node in enumerate(chain.results):
            copies[node] = written.call_function(operator.getitem, (call, position))
    return written, numbers


def _bound_calls(graph: Graph) -> Iterator[tuple[Node, BoundCall]]:
    """Yield the calls of modules that are calls of the bound operator."""
    assert graph.owning_module is not None
    for node in graph.find_nodes(op="call_module"):
        module = graph.owning_module.get_submodule(str(node.target))
        if not isinstance(module, OpaqueModule) or any(
            user.target is not operator.getitem for user in node.users
        ):
            continue
        call = module.opaque_bound(*_call_of(node))
        if call is not None:
            yield node, call


def _call_of(node: Node) -> tuple[Any, Any]:
    """Return which call of a module ``node`` is, and which results it takes as integers."""
    return node.kwargs["opaque_layout"], node.kwargs.get("leaf_quantized", ())


def _runs(graph: Graph, calls: Mapping[Node, BoundCall]) -> Iterator[list[Node]]:
    """Yield the nodes in their order: alone, or as many as one chain can have. What only reads of nodes that
    are before a chain is put before it."""
    run: dict[Node, None] = {}
    for node in graph.nodes:
        is_of_run = node.target is operator.getitem and node.args[0] in run
        if is_of_run or node in calls or _fits(node):
            run[node] = None
            continue
        only_reads = (
            node.op in ("placeholder", "get_attr") or node.target is operator.getitem or _is_size(node)
        )
        if not only_reads or not run.keys().isdisjoint(node.all_input_nodes):
            yield list(run)
            run = {}
        yield [node]


def _fits(node: Node) -> bool:
    """Return whether a chain can have the operator of ``node``."""
    if not isinstance(node.target, OpOverload):
        return False
    if node.target.namespace == NAMESPACE:
        return node.target._opname in OWN
    schema = node.target._schema
    if node.target.namespace != "aten" or schema.is_mutable or len(schema.arguments) > MOST_ARGUMENTS:
        return False
    is_random = torch.Tag.nondeterministic_seeded in node.target.tags
    if is_random or [str(result.type) for result in schema.returns] != ["Tensor"]:
        return False
    return all(_kind(argument, value) for argument, value in _arguments(node))


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
    """A chain of ``nodes``, some of which are ``calls`` of modules and the items of their results.

    Attributes:
        tensors, sizes: the nodes whose values it is given; after them, the tickets of its calls.
        results: the nodes of its results.
    """

    def __init__(self, nodes: Sequence[Node], calls: Mapping[Node, BoundCall]) -> None:
        self._calls = calls
        self._steps = [node for node in nodes if node.target is not operator.getitem]
        values, members = [node for node in nodes if node not in calls], set(nodes)
        self._last_reader = {source: node for node in self._steps for source in self._sources(node)}
        given = [source for source in self._last_reader if source not in members]
        self.sizes = [source for source in given if _is_size(source)]
        self.tensors = [source for source in given if not _is_size(source)]
        self.results = [node for node in values if not members.issuperset(node.users)]
        tickets = [node for node in nodes if node in calls]
        self._places = {node: f"s{place}" for place, node in enumerate([*self.sizes, *tickets])}
        self._places |= {node: f"t{place}" for place, node in enumerate([*self.tensors, *values])}

    def _sources(self, node: Node) -> list[Node]:
        call: Any = self._calls.get(node)
        sources: Any = node.all_input_nodes if call is None else [node.args[place] for place in call.places]
        return list(sources)

    def text(self) -> str:
        """Return the chain as ``Chain`` in ``operator_chains.h`` reads it."""
        unread: dict[Node, list[str]] = {node: [] for node in self._steps}
        for source in self._last_reader.keys() - {*self.sizes, *self.results}:
            unread[self._last_reader[source]].append(self._places[source][1:])
        tensors, sizes = (sum(place[0] == kind for place in self._places.values()) for kind in "ts")
        words: list[Any] = [len(self.tensors), tensors, sizes]
        for node in self._steps:
            words += self._words_of_call(node) if node in self._calls else self._words_of(node)
            words += [len(unread[node]), *unread[node]]
        words += ["end", *(self._places[node][1:] for node in self.results)]
        return " ".join(map(str, words))

    def _words_of(self, node: Node) -> Iterator[Any]:
        """Yield the operator of ``node``, the place of its result, and its arguments."""
        target: Any = node.target
        is_own = target.namespace == NAMESPACE
        yield from (target._opname if is_own else target._schema.name, self._places[node][1:])
        arguments = list(_arguments(node))
        if not is_own:
            yield from (target._overloadname, len(arguments))
        for argument, value in arguments:
            kind = _kind(argument, value)
            if not is_own:
                yield kind
            if is_own or kind != "N":
                yield from self._value(float(value) if str(argument.type) == "float" else value)

    def _words_of_call(self, node: Node) -> Iterator[Any]:
        rank, _, batch_first = self._calls[node]
        x, *states = self._sources(node)
        items = [user for user in node.users if user in self._places]
        yield from ("recurrent", len(items), self._places[x], *self._value(states), self._places[node])
        yield from (f"b{int(batch_first)}", f"i{WORK_PER_THREAD}", rank)
        for item in items:
            yield from (item.args[1], self._places[item][1:])

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
        else:
            yield str(value).lower()


def _is_size(node: Node) -> bool:
    return isinstance(node.meta.get("val"), (int, torch.SymInt))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Node) and isinstance(value.meta.get("val"), (Tensor, type(None)))


def _is_integer(value: Any) -> bool:
    return _is_size(value) if isinstance(value, Node) else type(value) is int


#: Kind -> whether a chain can write a value.
IS_OF_KIND: dict[str, Callable[[Any], bool]] = {
    "T": _is_tensor,
    "I": _is_integer,
    "F": lambda value: type(value) in (int, float),
    "B": lambda value: type(value) is bool,
    "S": lambda value: isinstance(value, (list, tuple)) and all(map(_is_integer, value)),
    "L": lambda value: isinstance(value, (list, tuple)) and all(map(_is_tensor, value)),
}
