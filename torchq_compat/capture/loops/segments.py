"""Finds what a Python loop left in a captured graph: repeated runs of the same ops, one run for each step."""

import operator
from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from torchq_compat.capture.opaque_stub import OPAQUE_OP, StubRegistry
from torchq_compat.capture.sizes.input_sizes import sizes_of
from torchq_compat.capture.sizes.shape_program import ShapeProgram
from torchq_compat.ops import facts, those
from torchq_compat.support.graph_nodes import attribute_of, module_path_of, replace_node
from torchq_compat.support.upstream import OpOverload, pytree

ATEN = torch.ops.aten
#: Op that computes with a number -> the position of the number, and the same op of a tensor.
WITH_NUMBER: dict[Any, tuple[int, Any]] = {
    **{op: (1, op) for op in (ATEN.add.Tensor, ATEN.sub.Tensor, ATEN.mul.Tensor, ATEN.div.Tensor)},
    **{
        getattr(ATEN, name).Scalar: (1, getattr(ATEN, name).Tensor)
        for name in ("eq", "ne", "lt", "le", "gt", "ge", "remainder")
    },
    ATEN.pow.Tensor_Scalar: (1, ATEN.pow.Tensor_Tensor),
    ATEN.pow.Scalar: (0, ATEN.pow.Tensor_Tensor),
    ATEN.remainder.Scalar_Tensor: (0, ATEN.remainder.Tensor),
    ATEN.rsub.Scalar: (1, ATEN.rsub.Tensor),
    ATEN.full.default: (1, ATEN.expand.default),
}
#: The fewest steps of a loop; fewer may be a repetition by chance.
FEWEST = 3
#: The most starting nodes of a loop that are tried, over all lengths of a step.
MOST_CANDIDATES = 256

Leaf = Any
#: The nodes of each step, equal ones at equal positions; None for a node without readers that the last step
#: lacks.
Steps = list[list[Node | None]]


def tidy_graph(graph_module: GraphModule, stubs: StubRegistry, lengths: Collection[tuple[int, int]]) -> None:
    """Make equal steps look equal: read sizes from inputs, remove checks, make constants once, and read the
    part of a step where it is first used.

    Args:
        lengths: the lengths of loops, each by the index of an input and the dimension.
    """
    graph = graph_module.graph
    parts: list[Node] = []
    for node in list(graph.nodes):
        if node.target in those("check"):
            graph.erase_node(node)
        elif node.target in those("takes apart"):
            parts.extend(_read_one_by_one(node))
        elif node.target is ATEN.cat.default:
            _flatten_cat(node)
    graph.eliminate_dead_code()
    _share_lifted_constants(graph_module)
    _take_sizes_of_inputs(graph_module, stubs)
    _number_steps(graph, lengths)
    _compute_numbers_early(graph)
    _cut_steps_last(graph)
    _make_constants_once(graph_module)
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in parts:
        if node in order and not _is_written(node.args[0]):
            min(node.users, key=order.__getitem__).prepend(node)
    graph.lint()


def _is_written(source: Any) -> bool:
    """Return whether a part of ``source`` is written in place, so that its readers must not move."""
    parts = [user for user in source.users if facts(user.target).index] if isinstance(source, Node) else []
    return any(writes_in_place(user) for part in parts for user in part.users)


def writes_in_place(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _read_one_by_one(node: Node) -> Iterator[Node]:
    """Replace each result of an op that splits a tensor into parts by a select or slice, and yield these."""
    source, *remaining = node.args
    value: Any = node.meta.get("val")
    is_unbind = node.target is ATEN.unbind.int
    has_dim = len(remaining) >= (1 if is_unbind else 2)
    dim = node.kwargs.get("dim", remaining[-1] if has_dim else 0)
    if not is_unbind and any(part.shape[dim] != 1 for part in value):
        return
    for user in list(node.users):
        index: Any = user.args[1]
        with node.graph.inserting_before(user):
            if is_unbind:
                result = node.graph.call_function(ATEN.select.int, (source, dim, index))
            else:
                result = node.graph.call_function(ATEN.slice.Tensor, (source, dim, index, index + 1))
        result.meta = dict(user.meta)
        replace_node(user, result)
        yield result


def _flatten_cat(node: Node) -> None:
    """Read what a ``cat`` in front of ``node`` reads: a tensor that grows by every step is one list."""
    listed: list[Any] = []
    parts: Any = node.args[0]
    for part in parts:
        is_alike = (
            isinstance(part, Node) and part.target is ATEN.cat.default and _dim_of(part) == _dim_of(node)
        )
        listed.extend(part.args[0] if is_alike and len(part.users) == 1 else [part])
    node.update_arg(0, listed)


def _dim_of(cat: Node) -> int:
    dim: Any = cat.args[1] if len(cat.args) > 1 else cat.kwargs.get("dim", 0)
    return int(dim) % int(cat.meta["val"].dim())


def _take_sizes_of_inputs(graph_module: GraphModule, stubs: StubRegistry) -> None:
    """Read every size that is the size of an input from that input, once, in front of the first op."""
    graph, known = graph_module.graph, dict[tuple[Node, int], Node]()
    first = next((node for node in graph.nodes if node.op == "call_function"), None)
    for node, place in _origins_of_sizes(graph_module, stubs).items():
        if place not in known:
            with graph.inserting_before(first):
                known[place] = graph.call_function(ATEN.sym_size.int, place)
            known[place].meta = dict(node.meta)
        node.replace_all_uses_with(known[place])
        if node is first:
            first = node.next
        graph.erase_node(node)


def _number_steps(graph: Graph, lengths: Collection[tuple[int, int]]) -> None:
    """Write numbers in place of the indices that are computed from a length, as in ``x[:, n - 1 - t]``."""
    inputs = graph.find_nodes(op="placeholder")
    places = {(inputs[index], dim) for index, dim in lengths}
    numbers: dict[Any, Any] = {}
    for node in list(graph.nodes):
        is_size = node.target is ATEN.sym_size.int and tuple(node.args) in places
        is_sum = node.target in (operator.add, operator.sub) and not numbers.keys().isdisjoint(node.args)
        if is_size or (is_sum and all(type(leaf) is int or leaf in numbers for leaf in node.args)):
            numbers[node] = node.meta["val"]
        for index in facts(node.target).index:
            if index < len(node.args) and isinstance(node.args[index], Node) and node.args[index] in numbers:
                node.update_arg(index, int(numbers[node.args[index]]))
    graph.eliminate_dead_code()


def computes_number(node: Node) -> bool:
    """Return whether ``node`` computes a number of sizes and numbers."""
    return node.op == "call_function" and type(node.meta.get("val")) in (int, float, bool)


def _compute_numbers_early(graph: Graph) -> None:
    """Compute each number right behind what it is computed from: the first step may be its first reader."""
    for node in list(graph.nodes):
        if computes_number(node) and node.all_input_nodes:
            last = max(node.all_input_nodes)
            if last.op != "placeholder":
                last.append(node)


def _cut_steps_last(graph: Graph) -> None:
    """Cut the part of the step last where a part of it is written: ``h[t, :, 1] = y`` writes into step ``t``
    of ``h[:, :, 1]``, which is cut once for all steps."""
    written: dict[Hashable, list[list[Node]]] = {}
    for node in graph.nodes:
        views = _cuts_of(node.args[0]) if writes_in_place(node) else []
        if len(views) > 1:
            written.setdefault((views[0].args[0], *(view.args[1] for view in views)), []).append(views)
    known: dict[Hashable, Node] = {}
    for chains in written.values():
        kinds = [len({view.args[2:] for view in column}) for column in zip(*chains, strict=True)]
        step = kinds.index(max(kinds))
        if max(kinds) >= FEWEST:
            for views in chains:
                _cut_last(views, step, known)
    graph.eliminate_dead_code()


def _cuts_of(view: Any) -> list[Node]:
    """Return the views that cut parts out of a tensor one after the other, up to ``view``."""
    views: list[Node] = []
    while isinstance(view, Node) and facts(view.target).index and len(view.all_input_nodes) == 1:
        views.insert(0, view)
        view = view.args[0]
    return views


def _cut_last(views: Sequence[Node], step: int, known: dict[Hashable, Node]) -> None:
    source: Any = views[0].args[0]
    dims = list(range(source.meta["val"].dim()))
    of_source: list[int] = []
    for view in views:
        of_source.append(dims[view.args[1]])  # type: ignore[index]
        if view.target is ATEN.select.int:
            dims.pop(view.args[1])  # type: ignore[arg-type]
    dims, result = list(range(source.meta["val"].dim())), source
    for index in [*(index for index in range(len(views)) if index != step), step]:
        view, dim = views[index], dims.index(of_source[index])
        key = None if index == step else (result, view.target, dim, view.args[2:])
        if key not in known or key is None:
            with view.graph.inserting_before(views[-1]):
                cut = view.graph.call_function(view.target, (result, dim, *view.args[2:]))  # type: ignore[arg-type]
            cut.meta = {**view.meta, "val": view.target(result.meta["val"], dim, *view.args[2:])}  # type: ignore[operator]
            known[key] = cut
        result = known[key]
        if view.target is ATEN.select.int:
            dims.pop(dim)
    views[-1].replace_all_uses_with(result)


def _origins_of_sizes(graph_module: GraphModule, stubs: StubRegistry) -> dict[Node, tuple[Node, int]]:
    """Return node of a size -> input and dimension that have the same size, also if that changes."""
    sizes = graph_module.graph.find_nodes(op="call_function", target=ATEN.sym_size.int)
    asked = [node for node in sizes if type(node.meta["val"]) is int]  # No longest of given lengths.
    inputs = {node.name: node for node in graph_module.graph.find_nodes(op="placeholder")}
    examples = {name: node.meta.get("val") for name, node in inputs.items()}
    program, places = ShapeProgram.of(graph_module, examples), sizes_of(examples)
    matches: dict[Node, tuple[Node, int]] = {}
    for place, size in places.items() if asked else ():
        alike = [other for other, known in places.items() if known == size]
        for changed in ([place], alike):
            with suppress(Exception), stubs.active():  # The sizes may not fit each other.
                values = program.values({**places, **dict.fromkeys(changed, size + 1)})
                for node in asked:
                    if (node.meta["val"], values[node]) == (size, size + 1):
                        matches.setdefault(node, (inputs[changed[0][0]], changed[0][1]))
                break
    return matches


#: The beginning of torch.export's names for tensors that the model's Python makes of numbers.
LIFTED = "lifted_tensor_"


def _share_lifted_constants(graph_module: GraphModule) -> None:
    known: list[tuple[Node, Tensor]] = []
    for node in graph_module.graph.find_nodes(op="get_attr"):
        if LIFTED not in str(node.target):
            continue
        value: Tensor = attribute_of(graph_module, node)
        same = (other for other, kept in known if kept.dtype == value.dtype and torch.equal(kept, value))
        if (other := next(same, None)) is None:
            known.append((node, value))
            # The step is no part of the module that made it.
            node.target = str(node.target).replace(".", "_")
            setattr(graph_module, node.target, value)
        else:
            replace_node(node, other)


def _make_constants_once(graph_module: GraphModule) -> None:
    """Create equal constants, such as the zeros that a first step makes itself, once and before all steps.

    ``x.new_zeros`` uses only the dtype and device of ``x``, so an input and an explicit dtype take its place.
    """
    graph, known = graph_module.graph, dict[str, Node]()
    inputs = [node for node in graph.find_nodes(op="placeholder") if isinstance(node.meta.get("val"), Tensor)]
    sizes = {node for node in graph.nodes if node.target is ATEN.sym_size.int and node.args[0] in inputs}
    for node in list(graph.nodes):
        if node.target not in those("constant", "constant like") or _is_written(node) or not inputs:
            continue
        if any(writes_in_place(user) for user in node.users):
            continue
        args, kwargs = node.args, dict(node.kwargs)
        if node.target is ATEN.full.default and type(args[1]) is int:
            continue  # It may be the number of the step.
        if node.target in those("constant like"):
            args = (inputs[0], *args[1:])
            kwargs["dtype"] = node.meta["val"].dtype
        if any(
            isinstance(leaf, Node) and leaf not in {*sizes, inputs[0]} for leaf in pytree.tree_leaves(args)
        ):
            continue
        key = repr((node.target, args, kwargs))
        if key not in known:
            reads = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Node)]
            order = {item: index for index, item in enumerate(graph.nodes)}
            after = max([*reads, inputs[-1]], key=order.__getitem__)
            with graph.inserting_after(after):
                known[key] = graph.call_function(node.target, args, kwargs)
            known[key].meta = dict(node.meta)
        replace_node(node, known[key])


def compared_arguments(node: Node) -> Any:
    """Return the arguments of ``node`` that those of other steps are compared with: without the layout index
    of an opaque call, which counts its calls."""
    return (node.args[:3] if node.target is OPAQUE_OP else node.args), node.kwargs


def leaves_of(node: Node) -> list[Leaf]:
    """Return the leaves of the ``compared_arguments`` of ``node``."""
    return pytree.tree_leaves(compared_arguments(node), is_leaf=lambda leaf: isinstance(leaf, slice))


@dataclass(frozen=True)
class _Run:
    """A range of nodes, ``start`` to ``end``, whose tokens repeat every ``period`` nodes."""

    start: int
    end: int
    period: int

    @property
    def covered(self) -> int:
        return self.end - self.start


def candidates(graph_module: GraphModule, stubs: StubRegistry) -> Iterator[Steps]:
    """Yield the steps of possible loops, those that cover most of the graph first."""
    nodes = [node for node in graph_module.graph.nodes if node.op in ("call_function", "call_module")]
    tokens = [_token(node, stubs) for node in nodes]
    count = 0
    for run in sorted(_runs(tokens), key=lambda run: (-run.covered, run.period)):
        for start in range(run.start, run.start + run.period):
            whole = (run.end - start) // run.period
            if whole < FEWEST or count >= MOST_CANDIDATES:
                break
            count += 1
            at = range(start, start + whole * run.period, run.period)
            steps: Steps = [[*nodes[index : index + run.period]] for index in at]
            last = _partial_step(nodes, tokens, start, start + whole * run.period, run.period)
            if last is not None:
                yield [*steps, last]
            yield steps


def _runs(tokens: Sequence[Hashable]) -> Iterator[_Run]:
    for period in range(1, len(tokens) // FEWEST + 1):
        start = None
        for index in range(len(tokens) - period + 1):
            is_equal = index + period < len(tokens) and tokens[index] == tokens[index + period]
            if is_equal and start is None:
                start = index
            elif not is_equal and start is not None:
                if index + period - start >= FEWEST * period:
                    yield _Run(start, index + period, period)
                start = None


def _partial_step(
    nodes: Sequence[Node], tokens: Sequence[Hashable], start: int, at: int, period: int
) -> list[Node | None] | None:
    """Return the nodes of a last step that lacks what only a next step would read; None if none follow."""
    matches: list[Node | None] = [None] * period
    place = 0
    while at < len(nodes):
        expected = next((j for j in range(place, period) if tokens[start + j] == tokens[at]), None)
        if expected is None:
            break
        matches[expected] = nodes[at]
        place, at = expected + 1, at + 1
    return matches if any(matches) else None


def _token(node: Node, stubs: StubRegistry) -> Hashable:
    if node.op == "call_module":
        return node  # A loop that is already rolled.
    wild = facts(node.target).index
    number, _ = WITH_NUMBER.get(node.target, (None, None))
    args: Any = tuple(
        "#" if index in wild or (index == number and type(arg) is int) else arg
        for index, arg in enumerate(node.args)
    )
    if node.target is OPAQUE_OP:
        tensors, sizes, handle, layout = node.args
        inputs = stubs.layouts(str(handle))[int(layout)].inputs  # type: ignore[arg-type]
        args = (tensors, sizes, handle, repr(inputs))
    path = module_path_of(node).partition("@")[0]
    return node.target, path, repr(_without_nodes(args)), repr(_without_nodes(dict(node.kwargs)))


def _without_nodes(value: Any) -> Any:
    return pytree.tree_map_only(Node, lambda _node: "*", value)
