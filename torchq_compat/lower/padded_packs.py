"""Packed sequences in an exported program, as all steps of all sequences, including padding.

The number of rows of a packed sequence depends on the data, so an exported program cannot loop over the rows.
Its rows are those of the padded input, (T * B, features) with time first: ops that compute each row by itself
need no change. ``batch_sizes`` has T entries, zeros behind the longest sequence, so that it shows which rows
are padding. In padding, loops over time keep a state unchanged, and unpacked sequences have the padding
value. Rows that the program returns are only those of steps, like the model's.
"""

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from torchq_compat.capture.packed_sequences import PACK, PAD, is_step
from torchq_compat.support import upstream
from torchq_compat.support.graph_nodes import replace_node

#: The keyword argument of an opaque call with the index of its layout.
OPAQUE_LAYOUT = "opaque_layout"


def with_padded_packs(graph_module: GraphModule) -> GraphModule:
    """Replace packing and unpacking by their forms for padded rows, in place, and return ``graph_module``."""
    graph = graph_module.graph
    _return_steps_alone(graph_module)
    for node in graph.nodes:
        if node.target is PACK:
            node.target = _pack_padded
            _count_steps(graph_module, node)
        elif node.target is PAD:
            node.target = _pad_padded
    graph_module.recompile()
    return graph_module


def _return_steps_alone(graph_module: GraphModule) -> None:
    """Drop padding from the returned rows, and steps that no sequence has from the returned batch sizes."""
    graph, sizes_of = graph_module.graph, dict[Node, Node]()
    batch_sizes = set[Node]()
    for node in list(graph.nodes):
        if node.target in (PAD, torch.ops.aten.sym_size.int):
            continue
        if node.target is PACK:
            rows, sizes = _result(graph, node, 0), _result(graph, node, 1)
            sizes_of[rows] = sizes
            batch_sizes.add(sizes)
        elif OPAQUE_LAYOUT in node.kwargs:
            for shown, shown_sizes, given in _packed_results(graph_module, node):
                sizes_of.update(dict.fromkeys(shown, given))
                batch_sizes.update(shown_sizes)
        elif node.op == "call_function" and node not in batch_sizes and node not in sizes_of:
            # Every op on rows returns rows; otherwise capture would have raised.
            packed = next((producer for producer in node.all_input_nodes if producer in sizes_of), None)
            if packed is not None:
                sizes_of[node] = sizes_of[packed]
    output = graph.output_node()
    with graph.inserting_before(output):
        for node in output.all_input_nodes:
            if node in sizes_of:
                output.replace_input_with(node, graph.call_function(_steps_alone, (node, sizes_of[node])))
            elif node in batch_sizes:
                output.replace_input_with(node, graph.call_function(_sizes_of_steps, (node,)))


def _result(graph: Graph, call: Node, index: int) -> Node:
    result = next((user for user in call.users if user.args[1] == index), None)
    if result is None:
        with graph.inserting_after(call):
            result = graph.call_function(operator.getitem, (call, index))
    return result


def _packed_results(graph_module: GraphModule, call: Node) -> Iterator[tuple[list[Node], list[Node], Node]]:
    """Yield the nodes of the rows and of the batch sizes that a custom module returns, and the batch sizes
    that it is given."""
    module: Any = graph_module.get_submodule(str(call.target))
    layout = module.opaque_layouts[call.kwargs[OPAQUE_LAYOUT]]
    given, returned = layout.inputs.holds_indices(), layout.outputs.holds_indices()
    if True not in given or True not in returned:
        return
    first = returned.index(True)
    at = {index: [user for user in call.users if user.args[1] == index] for index in (first - 1, first)}
    sizes: Any = call.args[given.index(True)]
    yield at[first - 1], at[first], sizes


def _count_steps(graph_module: GraphModule, pack: Node) -> None:
    """Replace the size of ``batch_sizes``, which was the length of the longest sequence, by a count of its
    nonzero entries."""
    whole = pack.args[3]
    for getitem in list(pack.users):
        sizes = [user for user in getitem.users if user.target is torch.ops.aten.sym_size.int]
        if getitem.args[1] != 1 or whole or not sizes:
            continue
        with graph_module.graph.inserting_after(getitem):
            longest = graph_module.graph.call_function(_longest, (getitem,))
        for size in sizes:
            replace_node(size, longest)


def _longest(batch_sizes: Tensor) -> Any:
    longest = (batch_sizes > 0).sum().item()
    upstream.assume(longest >= 1)
    upstream.assume(longest <= batch_sizes.shape[0])
    return longest


def _steps_alone(rows: Tensor, batch_sizes: Tensor) -> Tensor:
    batch = rows.shape[0] // batch_sizes.shape[0]
    return rows[is_step(batch_sizes, batch).reshape(-1)]


def _sizes_of_steps(batch_sizes: Tensor) -> Tensor:
    return batch_sizes[batch_sizes > 0]


def _pack_padded(input: Tensor, lengths: Tensor, batch_first: bool, whole: bool) -> tuple[Tensor, Tensor]:
    steps_first = input.transpose(0, 1) if batch_first else input
    steps, batch = steps_first.shape[:2]
    batch_sizes = (lengths[None] > torch.arange(steps, device=lengths.device)[:, None]).sum(1)
    return steps_first.reshape(steps * batch, *steps_first.shape[2:]), batch_sizes


def _pad_padded(
    rows: Tensor, batch_sizes: Tensor, batch: int, batch_first: bool, padding_value: float, steps: int
) -> tuple[Tensor, Tensor]:
    given = batch_sizes.shape[0]
    mask = is_step(batch_sizes, batch)
    padded = rows.reshape(given, batch, *rows.shape[1:])
    shown = mask.reshape(given, batch, *[1] * (rows.dim() - 1))
    padded = torch.where(shown, padded, padded.new_full((), padding_value))
    if steps is not given:
        if isinstance(steps, int):
            padded = torch.cat([padded, padded.new_full((steps, *padded.shape[1:]), padding_value)])
        padded = padded[:steps]
    return (padded.transpose(0, 1) if batch_first else padded), mask.sum(0)
