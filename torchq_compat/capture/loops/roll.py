"""Rolls the loops over time of a float model into an equal model of free length, or raises the reason."""

import copy
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from torchq_compat.capture.inlined_blocks import detach_writes
from torchq_compat.capture.loops.length_guards import KeptGuards, Length, keep_guards
from torchq_compat.capture.loops.loop_module import LONGER, GraphModel, Loop, LoopedSizes
from torchq_compat.capture.loops.roll_graph import RolledGraph, roll_graph
from torchq_compat.capture.loops.segments import LIFTED, compared_arguments, leaves_of
from torchq_compat.capture.loops.step_flow import NotALoopError
from torchq_compat.capture.opaque_calls import insert_calls
from torchq_compat.capture.opaque_stub import OPAQUE_OP, StubRegistry
from torchq_compat.capture.packed_sequences import PackingMode
from torchq_compat.capture.sizes.size_reads import Guard, ReadSizes, SizeReads
from torchq_compat.capture.torch_export import capture_freely, copied_inputs
from torchq_compat.capture.trial_runs import (
    CAPTURED,
    LONG,
    FloatRun,
    Runs,
    alone_and_seeded,
    difference,
    trial_copy,
    with_sizes,
)
from torchq_compat.capture.unseen_python import marked_functions, show_identities
from torchq_compat.capture.writes import make_out_of_place
from torchq_compat.support import metadata
from torchq_compat.support.graph_nodes import attribute_of
from torchq_compat.support.upstream import pytree

# Combines two rolled graphs of one model, captured at two lengths, into one graph of free length.
#
# The graphs have to be equal node by node except for integers that depend on a length, which are replaced by
# computations with the sizes of the inputs. Each length grew by a different number, which identifies it.


ATEN = torch.ops.aten


def follow_lengths(short: RolledGraph, long: RolledGraph, lengths: Sequence[Length]) -> None:
    """Replace the integers of ``short`` that depend on one of ``lengths`` by computations with input sizes.

    Raises:
        NotALoopError: the graphs differ in anything else.
    """
    if [loop.form for loop in short.loops] != [loop.form for loop in long.loops]:
        raise NotALoopError("other loops are found at another length")
    for one, other in zip(short.loops, long.loops, strict=True):
        if differing := list(_differences(one.graph, other.graph)):
            raise NotALoopError(f"a step computes with its number or with the length: {differing[0][0]}")
    graph = short.graph_module.graph
    sizes: dict[Length, Node] = {}
    for node, changes in list(_differences(graph, long.graph_module.graph)):
        leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
        for index, other in changes.items():
            length = _length_of(node, leaves[index], other, lengths)
            leaves[index] = _with_length(graph, node, leaves[index], other, length, sizes)
        node.args, node.kwargs = pytree.tree_unflatten(leaves, spec)


def _differences(one: Graph, other: Graph) -> list[tuple[Node, dict[int, Any]]]:
    """Return the nodes of ``one`` with constants that differ in ``other``, and the constants of ``other`` by
    the index of the leaf."""
    nodes, others = list(one.nodes), list(other.nodes)
    if len(leaves_of(one.output_node())) != len(leaves_of(other.output_node())):
        raise NotALoopError("its result is a list with one tensor for each step")
    if len(nodes) != len(others):
        raise NotALoopError("the graph has more nodes at another length")
    numbers = {node: index for index, node in enumerate(nodes)}
    other_numbers = {node: index for index, node in enumerate(others)}
    result = []
    for node, twin in zip(nodes, others, strict=True):
        same_target = node.target == twin.target or node.op in ("placeholder", "get_attr", "output")
        if node.op != twin.op or not same_target:
            raise NotALoopError(f"{node} is {twin} at another length")
        leaves, spec = pytree.tree_flatten(compared_arguments(node))
        twins, twin_spec = pytree.tree_flatten(compared_arguments(twin))
        if spec != twin_spec:
            raise NotALoopError(f"{node} has other arguments at another length")
        changes = {}
        for index, (leaf, twin_leaf) in enumerate(zip(leaves, twins, strict=True)):
            if isinstance(leaf, Node) and isinstance(twin_leaf, Node):
                if numbers[leaf] != other_numbers[twin_leaf]:
                    raise NotALoopError(f"{node} reads something else at another length")
            elif type(leaf) is not type(twin_leaf):
                raise NotALoopError(f"{node} has other arguments at another length")
            elif leaf != twin_leaf:
                changes[index] = twin_leaf
        if changes:
            result.append((node, changes))
    return result


def _length_of(node: Node, one: Any, other: Any, lengths: Sequence[Length]) -> Length:
    result = None
    if isinstance(one, int) and not isinstance(one, bool):
        result = next((length for length in lengths if abs(other - one) == length.grown), None)
    if result is None:
        raise NotALoopError(f"{node} computes with a length: {one} becomes {other}")
    return result


def _with_length(
    graph: Graph, node: Node, one: int, other: int, length: Length, sizes: dict[Length, Node]
) -> Node:
    slope = 1 if other > one else -1
    if length not in sizes:
        placeholders = graph.find_nodes(op="placeholder")
        with graph.inserting_after(placeholders[-1]):
            size = length.size_in(placeholders)
            sizes[length] = graph.call_function(ATEN.sym_size.int, (size.node, size.dim))
    with graph.inserting_before(node):
        result = sizes[length]
        if slope < 0:
            result = graph.call_function(operator.neg, (result,))
        offset = one - slope * length.short
        return graph.call_function(operator.add, (result, offset)) if offset else result


# Rolls the loops over time of a float model into an equal model of free length, or raises the reason why
# not.
#
# The unrolled graphs of two short lengths are rolled and have to agree; the rolled model then runs beside
# the float model at lengths that neither graph had.


#: The least sizes of the shorter capture: the second for loops that leave out steps.
SHORT = (5, 9)
MOST_LOOPS = 8
#: Puts stubs into a model, and returns the float modules that they replace, by handle.
PutStubs = Callable[[nn.Module, StubRegistry], Mapping[str, nn.Module]]


@dataclass
class RolledModel:
    """A model whose loops are modules.

    Attributes:
        model: the model, with the user's modules at their paths, except those that only loops call, and with
            the loops.
        loops: the loops by path.
        decided: the lines whose ``assert`` is left out, and those that ask for a buffer's value, with it.
        read: what Python decided by sizes outside of the loops.
    """

    model: nn.Module
    loops: Mapping[str, Loop] = field(default_factory=dict)
    decided: tuple[tuple[str, Any], ...] = ()
    read: ReadSizes = field(default_factory=ReadSizes)


@dataclass(frozen=True)
class _Captured:
    """The stubs of a capture, the float modules that they replaced, by handle, and what Python asked."""

    stubs: StubRegistry
    modules: Mapping[str, nn.Module]
    read: ReadSizes


def roll_loops(
    working: nn.Module,
    runs: Runs,
    example: FloatRun,
    inputs: Mapping[str, Any],
    looped: LoopedSizes,
    put_stubs: PutStubs,
    *,
    is_trained: bool,
) -> RolledModel:
    """Return ``working`` with its loops over ``looped`` rolled.

    Args:
        example: the run of ``working`` on the leaves ``inputs``, by label.
        is_trained: whether the rolled model will be trained.

    Raises:
        NotALoopError: no loop can be rolled that computes the same at every length.
    """
    args = example.args
    rolled, captured, guards = _rolled_at_two_lengths(working, args, inputs, looped, put_stubs)
    result = _build(working, rolled, captured)
    if is_trained:
        _refuse_parted_parameters(result)
    result.read = _check(result, runs, example, inputs, looped, guards)
    _keep_examples(result, args, inputs, looped)
    return result


def _rolled_at_two_lengths(
    working: nn.Module,
    args: tuple[Any, ...],
    inputs: Mapping[str, Any],
    looped: LoopedSizes,
    put_stubs: PutStubs,
) -> tuple[RolledGraph, _Captured, KeptGuards]:
    """Return the rolled graph, what was captured, and what Python decided by sizes in both captures."""
    numbered = (f"loop_{index}" if index else "loop" for index in itertools.count())
    names = list(itertools.islice((name for name in numbered if not hasattr(working, name)), MOST_LOOPS))
    for least in SHORT:
        lengths = _choose_lengths(inputs, looped, least)
        places = [place for length in lengths for place in length.places]
        capture = functools.partial(_capture_rolled, working, put_stubs, names, places)
        shorts = [length.short for length in lengths]
        rolled, captured = capture(with_sizes(args, inputs, looped.sizes(shorts)))
        if rolled.loops:
            break
    else:
        raise NotALoopError(
            next(iter(rolled.reasons), "no three steps run the same ops: one may read a list that grows")
        )
    longs = [length.short + length.grown for length in lengths]
    other, of_long = capture(with_sizes(args, inputs, looped.sizes(longs)))
    follow_lengths(rolled, other, lengths)
    return rolled, captured, keep_guards(captured.read, of_long.read, lengths)


def _choose_lengths(inputs: Mapping[str, Any], looped: LoopedSizes, least: int) -> list[Length]:
    """Return the lengths of the two captures, of ``least`` size: sizes that no input dimension has, because
    torch.export treats equal sizes as one."""
    labels = list(inputs)
    known = {size for leaf in inputs.values() if isinstance(leaf, Tensor) for size in leaf.shape}
    lengths = list[Length]()
    for group in looped.groups:
        short = next(size for size in itertools.count(least) if size not in known)
        taken = [length.grown for length in lengths]
        grown = next(g for g in itertools.count(4) if g not in taken and short + g not in known)
        known |= {short, short + grown}
        label, dim = group[0]
        places = tuple((labels.index(label), dim) for label, dim in group)
        lengths.append(Length(places, short, grown, int(inputs[label].shape[dim])))
    return lengths


def _capture_rolled(
    working: nn.Module,
    put_stubs: PutStubs,
    names: Sequence[str],
    lengths: Sequence[tuple[int, int]],
    args: tuple[Any, ...],
) -> tuple[RolledGraph, _Captured]:
    model, stubs, reads = trial_copy(working), StubRegistry(), SizeReads()
    modules = put_stubs(model, stubs)
    show_identities(model)
    try:
        with stubs.capturing(model), marked_functions():
            graph_module = capture_freely(model, args, reads, PackingMode(whole=False))
            detach_writes(graph_module)
            make_out_of_place(graph_module, keep_writes_into_views=True)
    except Exception as cause:
        raise NotALoopError(f"torch.export cannot capture it unrolled: {cause}") from cause
    return roll_graph(graph_module, stubs, names, lengths), _Captured(stubs, modules, reads.read)


def _build(working: nn.Module, rolled: RolledGraph, captured: _Captured) -> RolledModel:
    working = copy.copy(working)
    for name, value in [
        *rolled.graph_module.named_buffers(recurse=False),
        *vars(rolled.graph_module).items(),
    ]:
        if LIFTED in name:
            vars(working)[name] = value
    steps = {
        loop.name: _with_float_calls(GraphModel(working, loop.graph), loop.graph, captured)
        for loop in rolled.loops
    }
    in_steps = {name: _paths_in(graph) for name, graph in steps.items()}
    loops = {
        loop.name: Loop(
            loop.form,
            GraphModel(_pruned(working, in_steps[loop.name].__contains__), steps[loop.name]),
        )
        for loop in rolled.loops
    }
    outer = GraphModel(working, rolled.graph_module.graph)
    for name, loop in loops.items():
        outer.add_module(name, loop)
    graph = _with_float_calls(outer, rolled.graph_module.graph, captured)
    only_in_steps = set[str]().union(*in_steps.values()) - _paths_in(graph)
    model = _like(working)(_pruned(working, lambda path: path not in only_in_steps), graph)
    for name, loop in loops.items():
        model.add_module(name, loop)
    decided = metadata.VALUES_DECIDED.of(rolled.graph_module) or ()
    return RolledModel(model, loops, decided)


def _with_float_calls(root: nn.Module, graph: Graph, captured: _Captured) -> Graph:
    """Return ``graph`` with calls of the float modules in place of the opaque calls."""
    graph_module = GraphModule(root, graph)
    called = {str(node.args[2]) for node in graph_module.graph.nodes if node.target is OPAQUE_OP}
    modules = {path: module for path, module in captured.modules.items() if path in called}
    insert_calls(graph_module, captured.stubs, modules)
    for node in graph_module.graph.nodes:
        node.meta.pop("val", None)
    return graph_module.graph


def _paths_in(graph: Graph) -> set[str]:
    """Return the paths of the modules whose code or parameters ``graph`` uses, and of those around them."""
    matches: set[str] = set()
    for node in graph.nodes:
        paths = [str(fqn).partition("@")[0] for fqn, _ in (node.meta.get("nn_module_stack") or {}).values()]
        if node.op in ("get_attr", "call_module"):
            paths.append(str(node.target))
        for path in paths:
            names = path.split(".")
            matches.update(".".join(names[:end]) for end in range(1, len(names) + 1))
    return matches


def _refuse_parted_parameters(rolled_model: RolledModel) -> None:
    """Raise if a loop shares parameters with the graph around it or another loop: each is copied when it is
    prepared, so training would make the copies differ."""
    known: set[int] = set()
    for model in (rolled_model.model, *(vars(loop)["step"] for loop in rolled_model.loops.values())):
        read = set[int]()
        for node in model.shared.graph.nodes:
            if node.op == "call_module":
                read.update(map(id, model.get_submodule(str(node.target)).parameters()))
            elif node.op == "get_attr":
                read.add(id(attribute_of(model, node)))
        if read & known:
            raise NotALoopError("it shares parameters with other code, and training would make copies differ")
        known |= read


def _pruned(module: nn.Module, keeps: Callable[[str], bool], prefix: str = "") -> nn.Module:
    """Return a shallow copy of ``module`` with only the submodules that ``keeps`` accepts by path. Replacing
    a submodule of the copy leaves ``module`` as it is."""
    if not module._modules:
        return module
    fewer = copy.copy(module)
    vars(fewer)["_modules"] = {
        name: child if child is None else _pruned(child, keeps, f"{prefix}{name}.")
        for name, child in module._modules.items()
        if child is None or keeps(f"{prefix}{name}")
    }
    return fewer


def _like(model: nn.Module) -> type[GraphModel]:
    """Return a GraphModel class with the name and the call signature of the class of ``model``."""

    @functools.wraps(type(model).forward)
    def forward(self: GraphModel, *args: Any) -> Any:
        return GraphModel.forward(self, *args)

    cls: type[GraphModel] = type(type(model).__name__, (GraphModel,), {"forward": forward})
    return cls


def _keep_examples(
    rolled_model: RolledModel, args: tuple[Any, ...], inputs: Mapping[str, Any], looped: LoopedSizes
) -> None:
    """Record the arguments that the steps are called with in the example, and at longer ones."""
    model = trial_copy(rolled_model.model)

    def run(args: tuple[Any, ...]) -> Iterator[tuple[Loop, Loop]]:
        with alone_and_seeded():
            model(*copied_inputs(args))
        for name, loop in rolled_model.loops.items():
            yield loop, cast("Loop", model.get_submodule(name))

    for loop, ran in run(args):
        loop.example, loop.first = ran.example, ran.first
    for group in looped.groups:
        label, dim = group[0]
        with suppress(Exception):  # A table has no entries for as many.
            for times in LONGER:
                size = dict.fromkeys(group, times * inputs[label].shape[dim])
                for loop, ran in run(with_sizes(args, inputs, size)):
                    name = f"{label}.size({dim})"
                    loop.longer[name] = (*loop.longer.get(name, ()), ran.example)


def _check(
    rolled_model: RolledModel,
    runs: Runs,
    example: FloatRun,
    inputs: Mapping[str, Any],
    looped: LoopedSizes,
    guards: KeptGuards,
) -> ReadSizes:
    """Run the rolled model beside the user's model: on the example, which its capture runs if it is long, and
    with each length changed alone.

    Args:
        guards: what Python decided by sizes.

    Returns:
        The same, with the doubtful guards that the results differ without, and, where they differ at short
        lengths all the same, as those do that are shorter than the steps before a loop, with bounds.

    Raises:
        NotALoopError: the results differ, or the float model runs at fewer than two lengths.
    """
    lengths_given = [length.example for length in guards.lengths]

    def problems(tried: Iterable[list[int]]) -> list[tuple[list[int], str | None]]:
        changed = ((sizes, with_sizes(example.args, inputs, looped.sizes(sizes))) for sizes in tried)
        known = ((sizes, example if sizes == lengths_given else None, args) for sizes, args in changed)
        results = ((sizes, run or runs.of_float_model(args)) for sizes, run, args in known)
        return [(sizes, _compare(rolled_model, run)) for sizes, run in results if run.error is None]

    results = problems(_lengths_tried(guards))
    if len(results) < 2:
        raise NotALoopError("the float model does not run at other lengths")
    idle = {id(guard) for sizes, problem in results if problem is None for guard in guards.broken_at(sizes)}
    needed, least = dict[int, Guard](), dict[int, int]()
    for sizes, problem in results:
        if problem is None:
            continue
        broken = {id(guard): guard for guard in guards.broken_at(sizes) if id(guard) not in idle}
        needed |= broken
        changed = [index for index, size in enumerate(sizes) if size != lengths_given[index]]
        lengths = {} if broken else {index: guards.lengths[index] for index in changed}
        for index, length in lengths.items():
            tried = problems(_changed(lengths_given, index, range(1, length.short + length.grown + 1)))
            least[index] = 1 + max(other[index] for other, found in tried if found is not None)
        if not changed or any(least[i] > min(known.short, known.example) for i, known in lengths.items()):
            raise NotALoopError(f"the rolled loop computes something else at lengths {sizes}: {problem}")
    return guards.with_guards(needed.values(), least, next(iter(looped.lines), None))


def _lengths_tried(guards: KeptGuards) -> Iterator[list[int]]:
    """Yield the lengths of the example, and those with one changed, also to each doubtful size."""
    example = [length.example for length in guards.lengths]
    if max(example) <= LONG or guards.broken_at(example):
        yield example
    for index, sizes in enumerate(guards.doubtful):
        yield from _changed(example, index, sorted({SHORT[1], 3, 1, *sizes} - {example[index]}))


def _changed(example: Sequence[int], index: int, sizes: Iterable[int]) -> Iterator[list[int]]:
    """Yield the lengths of the example with each of ``sizes`` in place of the one at ``index``."""
    yield from ([size if other == index else known for other, known in enumerate(example)] for size in sizes)


def _compare(rolled_model: RolledModel, run: FloatRun) -> str | None:
    rolled = Runs(rolled_model.model, StubRegistry(), {}, example=run.args).of_float_model(run.args)
    if rolled.error is not None:
        return f"{type(rolled.error).__name__}: {rolled.error}"
    return difference(run.value, rolled.value, CAPTURED)
