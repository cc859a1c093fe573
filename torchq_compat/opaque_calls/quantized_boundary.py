"""The quantized boundary of converted leaf modules, as FX has it.

Into a leaf: the dequantize before each input is bypassed, the module receives integers. Out of a leaf: each
used result leaves as integers through one dequantize, and whoever consumes it is not quantized again. A leaf
that feeds a leaf hands its integers straight on. The grids go into the call's layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from torchq_compat.graph import metadata
from torchq_compat.opaque_calls.insert_calls import leaf_nodes, tensor_arguments
from torchq_compat.opaque_calls.opaque_module import LeafModule
from torchq_compat.qspecs.qparams import Grid, PerTensorGrid

__all__ = [
    "DEQUANTIZE",
    "DEQUANTIZE_TARGETS",
    "grid_of_integers",
    "quantize_boundaries",
    "refresh_boundaries",
]

OPS = torch.ops.quantized_decomposed
QUANTIZE = OPS.quantize_per_tensor.default
DEQUANTIZE = OPS.dequantize_per_tensor.default
DEQUANTIZE_TARGETS = (DEQUANTIZE, OPS.dequantize_per_channel.default)
TO_DTYPE = torch.ops.aten.to.dtype


@dataclass(frozen=True)
class _Input:
    """An argument of a leaf call: the node to pass, and the grid of its integers, or None for floats."""

    node: Node
    grid: Grid | None


def quantize_boundaries(graph_module: GraphModule) -> None:
    """Rewrite the calls of all leaf modules in a converted graph."""
    for call in leaf_nodes(graph_module):
        module = graph_module.get_submodule(str(call.target))
        assert isinstance(module, LeafModule)
        inputs = [_decide_input(arg) for arg in tensor_arguments(call, module)]
        output_grids = module.leaf_output_grids(call.meta["val"])
        _apply(graph_module, call, module, inputs, output_grids)
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()


def refresh_boundaries(graph_module: GraphModule) -> None:
    """Read the grids of all boundaries again, after new qparams were loaded into the graph and its cells."""
    for call in leaf_nodes(graph_module):
        module = graph_module.get_submodule(str(call.target))
        assert isinstance(module, LeafModule)
        output_grids = module.leaf_output_grids(call.meta["val"])
        index = call.kwargs["leaf_layout"]
        assert isinstance(index, int)
        input_grids = tuple(grid_of_integers(arg) for arg in tensor_arguments(call, module))
        module.leaf_set_grids(index, input_grids, output_grids)
        for getitem in call.users:
            position = getitem.args[1]
            assert isinstance(position, int)
            metadata.INTEGERS.write(getitem, output_grids[position])


def grid_of_integers(arg: Node) -> Grid | None:
    """The grid of the integers ``arg`` gives: a quantize's, or that of a leaf's result."""
    if arg.target is QUANTIZE:
        return PerTensorGrid.of_node(arg)
    return metadata.INTEGERS.of(arg)


def _decide_input(arg: Node) -> _Input:
    if arg.target is TO_DTYPE and isinstance(arg.args[0], Node) and arg.args[0].target is DEQUANTIZE:
        arg = arg.args[0]
    if metadata.DEQUANTIZED.is_on(arg):
        source = arg.args[0]
        assert isinstance(source, Node)
        return _Input(source, metadata.DEQUANTIZED.required(arg))
    if arg.target is DEQUANTIZE:
        source = arg.args[0]
        assert isinstance(source, Node)
        return _Input(source, PerTensorGrid.of_node(arg))
    return _Input(arg, None)


def _apply(
    graph_module: GraphModule,
    call: Node,
    module: LeafModule,
    inputs: list[_Input],
    output_grids: tuple[Grid | None, ...],
) -> None:
    call.args = (*(entry.node for entry in inputs), *call.args[len(inputs) :])
    index = call.kwargs["leaf_layout"]
    assert isinstance(index, int)
    module.leaf_set_grids(index, tuple(entry.grid for entry in inputs), output_grids)
    for getitem in list(call.users):
        position = getitem.args[1]
        assert isinstance(position, int)
        grid = output_grids[position]
        if grid is not None:
            _insert_dequantize(graph_module, getitem, grid)


def _insert_dequantize(graph_module: GraphModule, getitem: Node, grid: Grid) -> None:
    graph = graph_module.graph
    value = getitem.meta["val"]
    with graph.inserting_after(getitem):
        if isinstance(grid, PerTensorGrid):
            qparams = (grid.scale, grid.zero_point, grid.quant_min, grid.quant_max, grid.dtype)
            dequantize = graph.call_function(DEQUANTIZE, (getitem, *qparams), _out_dtype(value))
        else:
            scales, zero_points = grid.tensors(value.device)
            scales_node = _constant(graph_module, f"{getitem.name}_scales", scales)
            zero_points_node = _constant(graph_module, f"{getitem.name}_zero_points", zero_points)
            dequantize = graph.call_function(
                OPS.dequantize_per_channel.default,
                (
                    getitem,
                    scales_node,
                    zero_points_node,
                    grid.axis,
                    grid.quant_min,
                    grid.quant_max,
                    grid.dtype,
                ),
                _out_dtype(value),
            )
            dequantize.prepend(scales_node)
            dequantize.prepend(zero_points_node)
    dequantize.meta = {**getitem.meta, metadata.DEQUANTIZED.name: grid}
    metadata.INTEGERS.write(getitem, grid)
    with value.fake_mode:
        getitem.meta["val"] = value.to(grid.dtype)
    getitem.replace_all_uses_with(dequantize, delete_user_cb=lambda user: user is not dequantize)


def _out_dtype(value: Tensor) -> dict[str, Any]:
    return {} if value.dtype is torch.float32 else {"out_dtype": value.dtype}


def _constant(graph_module: GraphModule, name: str, value: Tensor) -> Node:
    nn.Module.register_buffer(graph_module, name, value)
    return graph_module.graph.get_attr(name)
