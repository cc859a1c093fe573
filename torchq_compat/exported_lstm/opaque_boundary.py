"""The quantized boundary of an opaque LSTM: q-dq on its inputs and results, on the grids of its cells.

The cells quantize what arrives and hand out values on their own grids, so the q-dq here changes no value: it
shows a backend what it may pass as integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from torchq_compat.custom_modules.parts.part_graph import converted_grids
from torchq_compat.exported_lstm.opaque import OpaqueLSTM
from torchq_compat.exported_lstm.writer import free_name
from torchq_compat.qspecs.qparams import Grid, PerTensorGrid, combine_along
from torchq_compat.support.user_warnings import warn_user

__all__ = ["quantize_boundary"]

OPS = torch.ops.quantized_decomposed
QUANTIZE, DEQUANTIZE = OPS.quantize_per_tensor.default, OPS.dequantize_per_tensor.default
INPUTS, RESULTS = ("x", "h0", "c0"), ("output", "h_n", "c_n")


def quantize_boundary(graph_module: GraphModule, path: str, module: OpaqueLSTM) -> None:
    """Insert q-dq around every call of ``module``, which stands at ``path``; warns of edges left float."""
    inputs, results = _input_grids(module), _result_grids(module)
    for call in [node for node in graph_module.graph.nodes if node.op == "call_module"]:
        if call.target == path:
            # By position: one tensor may be both states, each on its own grid.
            call.args = tuple(
                _arriving(graph_module, call, argument, grid)
                for argument, grid in zip(call.args, inputs, strict=True)
            )
            for getitem in list(call.users):
                position: Any = getitem.args[1]
                if results[position] is not None:
                    _insert_after(graph_module, getitem, results[position])
    graph_module.graph.eliminate_dead_code()
    graph_module.graph.lint()
    graph_module.recompile()
    left = [name for name, grid in zip(INPUTS + RESULTS, inputs + results, strict=True) if grid is None]
    if left:
        warn_user(
            f"the boundary of {path!r} stays float at {', '.join(left)}: the quantizer did not quantize that "
            "edge of every cell, or not in one dtype."
        )


def _input_grids(module: OpaqueLSTM) -> tuple[Grid | None, ...]:
    first_layer = {_arriving_grids(direction.cell)[0] for direction in module.by_layer()[0]}
    x = first_layer.pop() if len(first_layer) == 1 else None
    _, h, c = zip(*(_arriving_grids(direction.cell) for direction in module.directions()), strict=True)
    return x, _combine(0, h, 1), _combine(0, c, 1)


def _result_grids(module: OpaqueLSTM) -> tuple[Grid | None, ...]:
    output = [converted_grids(direction.cell)[0] for direction in module.by_layer()[-1]]
    h, c = zip(*(converted_grids(direction.cell) for direction in module.directions()), strict=True)
    return _combine(2, output, module.output_size), _combine(0, h, 1), _combine(0, c, 1)


def _arriving_grids(cell: GraphModule) -> tuple[PerTensorGrid | None, ...]:
    """The grids on which a converted cell quantizes x, h and c; None where it does not."""
    return tuple(_grid_of_readers(node) for node in cell.graph.nodes if node.op == "placeholder")


def _grid_of_readers(placeholder: Node) -> PerTensorGrid | None:
    grids = {_grid_of(user, QUANTIZE) for user in placeholder.users}
    return grids.pop() if len(grids) == 1 else None


def _grid_of(node: Node, op: Any) -> PerTensorGrid | None:
    """The grid of a call of ``op``, a per-tensor quantize or dequantize; None for any other node."""
    return PerTensorGrid.of_node(node) if node.target is op else None


def _combine(axis: int, grids: Sequence[PerTensorGrid | None], size: int) -> Grid | None:
    known = [(grid, size) for grid in grids if grid is not None]
    return combine_along(axis, known) if len(known) == len(grids) else None


def _arriving(graph_module: GraphModule, call: Node, argument: Any, grid: Grid | None) -> Node:
    """``argument`` of ``call`` on ``grid``; as it is if it comes from there."""
    if grid is None or _grid_of(argument, DEQUANTIZE) == grid:
        source: Node = argument
        return source
    return _insert(graph_module, argument, grid, before=call)


def _insert_after(graph_module: GraphModule, node: Node, grid: Grid) -> None:
    """q-dq between ``node`` and its readers; one that quantizes it on that grid itself need not any more."""
    readers = list(node.users)
    q_dq = _insert(graph_module, node, grid, before=node.next)
    for reader in readers:
        reader.replace_input_with(node, q_dq)
        if _grid_of(reader, QUANTIZE) == grid:
            for dequantize in list(reader.users):
                dequantize.replace_all_uses_with(q_dq)


def _insert(graph_module: GraphModule, node: Node, grid: Grid, *, before: Node) -> Node:
    """q-dq of ``node`` on ``grid``; returns the dequantize."""
    graph = graph_module.graph
    with graph.inserting_before(before):
        if isinstance(grid, PerTensorGrid):
            qparams: tuple[Any, ...] = (
                grid.scale,
                grid.zero_point,
                grid.quant_min,
                grid.quant_max,
                grid.dtype,
            )
            quantize_op, dequantize_op = QUANTIZE, DEQUANTIZE
        else:
            scales, zero_points = grid.tensors(node.meta["val"].device)
            qparams = (
                _constant(graph_module, free_name(graph_module, f"{node.name}_scales"), scales),
                _constant(graph_module, free_name(graph_module, f"{node.name}_zero_points"), zero_points),
                *(grid.axis, grid.quant_min, grid.quant_max, grid.dtype),
            )
            quantize_op = OPS.quantize_per_channel.default
            dequantize_op = OPS.dequantize_per_channel.default
        quantized = graph.call_function(quantize_op, (node, *qparams))
        dequantized = graph.call_function(dequantize_op, (quantized, *qparams))
    dequantized.meta = dict(node.meta)
    return dequantized


def _constant(graph_module: GraphModule, name: str, value: torch.Tensor) -> Node:
    nn.Module.register_buffer(graph_module, name, value)
    return graph_module.graph.get_attr(name)
