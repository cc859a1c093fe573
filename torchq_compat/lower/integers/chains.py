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
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from torchq_compat.capture.loops.loop_module import LoopForm
from torchq_compat.capture.opaque_calls import BoundCall, OpaqueModule
from torchq_compat.recurrent.kernel.build import OF_LIBRARY
from torchq_compat.recurrent.kernel.op import NAMESPACE, OPS, WITHOUT_GRADIENTS, WORK_PER_THREAD
from torchq_compat.support.upstream import OpOverload, are_operators_watched

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
KINDS |= {"List[int]": "S", "List[SymInt]": "S", "List[Tensor]": "L"}


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
        self._chained: Forward | None = None
        self._loop: ChainedLoop | None = None
        self._is_first, self._failures = True, 0

    def __call__(self, model: Any, args: tuple[Any, ...]) -> Any:
        if are_operators_watched():
            return self._direct(model, *args)
        if self._chained is None:
            if self._is_first or not hasattr(OPS, OF_LIBRARY):
                self._is_first = False
                return self._direct(model, *args)
            self._chained = self._optional(self._with_chains, model) or self._direct
        try:
            return self._chained(model, *args)
        except (RuntimeError, IndexError):
            result = self._direct(model, *args)  # It fails too, and says where.
            self._failures += 1
            if self._failures > MOST_FAILURES:
                self._chained = self._direct
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

    def _with_chains(self, model: Any) -> Forward:
        graph, numbers = with_chains(self._graph)
        weakref.finalize(self, _forget, numbers).atexit = False
        return self._compiled(graph, model)

    def _with_loop(self, model: Any, form: LoopForm) -> ChainedLoop:
        graph, numbers = with_chains(self._graph, least=1)
        weakref.finalize(self, _forget, numbers).atexit = False
        return ChainedLoop.of(graph, form, lambda given: self._compiled(given, model))

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
        chains = [node for node in others if node.target is _operator()]
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
        return tuple(_operator("run_loop")(*given, self.chain, wholes[:read], steps, *described))


def _forget(numbers: Sequence[int]) -> None:
    for number in numbers:
        OPS.forget_chain.default(number)


@cache
def _operator(name: str = "run_chain") -> Any:
    WITHOUT_GRADIENTS.impl(name, torch.library.fallthrough_kernel, "Autograd")  # type: ignore[no-untyped-call]
    return getattr(OPS, name).default


def with_chains(graph: Graph, least: int = LEAST) -> tuple[Graph, list[int]]:
    """Return ``graph`` with chains in place of the operators between others, and their numbers.

    Args:
        least: the fewest operators of a chain.
    """
    written = Graph(graph.owning_module)
    written.set_codegen(graph._codegen)
    copies: dict[Node, Node] = {}
    numbers: list[int] = []
    calls = dict(_bound_calls(graph))
    for nodes, can_chain in _runs(graph, calls):
        if not can_chain or sum(node.target is not operator.getitem for node in nodes) < least:
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


def _runs(graph: Graph, calls: Mapping[Node, BoundCall]) -> Iterator[tuple[list[Node], bool]]:
    """Yield the nodes in their order, as many as a chain can have or one alone, and whether it can. What
    only reads of nodes that are before a chain is put before it."""
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
            yield list(run), True
            run = {}
        yield [node], False


def _only_reads(node: Node) -> bool:
    return node.op in ("placeholder", "get_attr") or node.target is operator.getitem or _is_size(node)


def _fits(node: Node) -> bool:
    """Return whether a chain can have the operator of ``node``."""
    if not isinstance(node.target, OpOverload):
        return False
    if node.target.namespace == NAMESPACE:
        return node.target._opname in OWN
    schema = node.target._schema
    if node.target.namespace != "aten" or schema.is_mutable or len(schema.arguments) > MOST_ARGUMENTS:
        return False
    returned = [str(result.type) for result in schema.returns]
    if torch.Tag.nondeterministic_seeded in node.target.tags or len(returned) > MOST_ARGUMENTS:
        return False
    if returned != ["List[Tensor]"] and set(returned) != {"Tensor"}:
        return False
    if _has_items(node) and any(user.target is not operator.getitem for user in node.users):
        return False
    return all(_kind(argument, value) for argument, value in _arguments(node))


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
    """A chain of ``nodes``, some of which are ``calls`` of modules and the items of their results.

    Attributes:
        tensors, sizes: the nodes whose values it is given; after them, the tickets of its calls.
        results: the nodes of its results.
    """

    def __init__(self, nodes: Sequence[Node], calls: Mapping[Node, BoundCall]) -> None:
        self._calls = calls
        self._steps = [node for node in nodes if node.target is not operator.getitem]
        values, members = [node for node in nodes if not _has_items(node)], set(nodes)
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
        values = self._places.keys() - {*self._calls, *self.sizes}
        unread: dict[Node, list[str]] = {node: [] for node in self._steps}
        for source in self._last_reader.keys() - {*self.sizes, *self.results}:
            unread[self._last_reader[source]].append(self._places[source][1:])
        tensors, sizes = (sum(place[0] == kind for place in self._places.values()) for kind in "ts")
        words: list[Any] = [len(self.tensors), tensors, sizes]
        for node in self._steps:
            words += self._words_of_call(node) if node in self._calls else self._words_of(node)
            items = [(0, node)] if node in values else [(user.args[1], user) for user in node.users]
            words += [len(items), *itertools.chain(*((at, self._places[item][1:]) for at, item in items))]
            words += [len(unread[node]), *unread[node]]
        words += ["end", *(self._places[node][1:] for node in self.results)]
        return " ".join(map(str, words))

    def _words_of(self, node: Node) -> Iterator[Any]:
        """Yield the operator of ``node`` and its arguments; of torch's, how many tensors it returns."""
        target: Any = node.target
        is_own = target.namespace == NAMESPACE
        yield target._opname if is_own else target._schema.name
        arguments = list(_arguments(node))
        if not is_own:
            yield from (target._overloadname, len(arguments))
        for argument, value in arguments:
            kind = _kind(argument, value)
            if not is_own:
                yield kind
            if is_own or kind != "N":
                yield from self._value(float(value) if str(argument.type) == "float" else value)
        if not is_own:
            returns = target._schema.returns
            yield 0 if str(returns[0].type) == "List[Tensor]" else len(returns)

    def _words_of_call(self, node: Node) -> Iterator[Any]:
        rank, _, batch_first = self._calls[node]
        x, *states = self._sources(node)
        yield from ("recurrent", self._places[x], *self._value(states), self._places[node])
        yield from (f"b{int(batch_first)}", f"i{WORK_PER_THREAD}", rank)

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
