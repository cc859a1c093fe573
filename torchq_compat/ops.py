"""Facts about aten operators: where their weights and parameters stand, which of them only move values,
which are batch norms.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from torchq_compat.support.graph_nodes import module_path_of

# The positions of parameters in the arguments of aten operators: the weight that a QConfig quantizes, the
# bias, and running statistics.


ATEN = torch.ops.aten
CONVOLUTIONS: tuple[Any, ...] = (
    *(ATEN.conv1d.default, ATEN.conv2d.default, ATEN.conv3d.default),
    *(ATEN.conv1d.padding, ATEN.conv2d.padding, ATEN.conv3d.padding),
)
TRANSPOSED: tuple[Any, ...] = (
    ATEN.conv_transpose1d.default,
    ATEN.conv_transpose2d.input,
    ATEN.conv_transpose3d.input,
)
WEIGHT_AND_BIAS = {"weight": 1, "bias": 2}
#: Normalizations, whose weight is never quantized -> parameter -> position of the argument.
NORMALIZATIONS: dict[object, dict[str, int]] = {
    ATEN.layer_norm.default: {"weight": 2, "bias": 3},
    ATEN.group_norm.default: {"weight": 2, "bias": 3},
    ATEN.instance_norm.default: {"weight": 1, "bias": 2, "running_mean": 3, "running_var": 4},
    ATEN.batch_norm.default: {"weight": 1, "bias": 2, "running_mean": 3, "running_var": 4},
}
PRELU = ATEN.prelu.default
RELU = (ATEN.relu.default, ATEN.relu_.default)
#: Operator -> parameter -> position of the argument.
PARAMETERS: dict[object, dict[str, int]] = {
    ATEN.linear.default: WEIGHT_AND_BIAS,
    ATEN.conv1d.default: WEIGHT_AND_BIAS,
    ATEN.conv1d.padding: WEIGHT_AND_BIAS,
    ATEN.conv2d.default: WEIGHT_AND_BIAS,
    ATEN.conv2d.padding: WEIGHT_AND_BIAS,
    ATEN.conv3d.default: WEIGHT_AND_BIAS,
    ATEN.conv3d.padding: WEIGHT_AND_BIAS,
    ATEN.conv_transpose1d.default: WEIGHT_AND_BIAS,
    ATEN.conv_transpose2d.input: WEIGHT_AND_BIAS,
    ATEN.conv_transpose3d.input: WEIGHT_AND_BIAS,
    ATEN.embedding.default: {"weight": 0},
    ATEN.embedding_bag.padding_idx: {"weight": 0},
    **NORMALIZATIONS,
    PRELU: {"weight": 1},
}


def weight_of(node: Node) -> Node | None:
    """Return the weight argument of ``node`` if a QConfig can quantize it, or None."""
    if node.target in NORMALIZATIONS or node.target is PRELU:
        return None
    edge = _edges(node).get("weight")
    return edge[0] if edge else None


def parameters_of(node: Node) -> dict[str, tuple[Node, Node]]:
    """Map "weight" and "bias" to the edge into ``node``, for those that ``node`` is given."""
    return {name: edge for name, edge in _edges(node).items() if name in ("weight", "bias")}


def parameter_nodes(node: Node) -> set[Node]:
    """Return all arguments of ``node`` that are parameters and not activations."""
    return {parameter for parameter, _ in _edges(node).values()}


def named_parameters_of(node: Node) -> dict[str, Node]:
    """Map each role, such as "weight" or "running_mean", to the parameter that ``node`` is given for it."""
    return {name: parameter for name, (parameter, _) in _edges(node).items()}


def _edges(node: Node) -> dict[str, tuple[Node, Node]]:
    edges = {}
    for name, position in PARAMETERS.get(node.target, {}).items():
        argument = node.args[position] if position < len(node.args) else None
        if isinstance(argument, Node):
            edges[name] = (argument, node)
    return edges


# The table of operators that only move data.
#
# Every value of the result is a value of the input, or zero, which all qparams can represent. So the result
# has the qparams of the input without rounding, and ATen's kernels run on quantized tensors unchanged.
#
# Legacy: FX's copy nodes and tensor shape nodes, around which FX removes dequantize and quantize.


def _always(node: Node) -> bool:
    return True


def _pads_with_values(node: Node) -> bool:
    """Return whether ``node`` pads with reflected values or zeros. Quantized tensors have no kernels for
    other modes."""
    mode, value = _argument(node, 2, "mode", "constant"), _argument(node, 3, "value", None)
    return mode == "reflect" or (mode == "constant" and not value)


def _drops_nothing(node: Node) -> bool:
    """Return whether the dropout ``node`` is in evaluation, where it is the identity."""
    return _argument(node, 2, "train", None) is False


#: Operator -> whether a call of it only moves data.
PASSTHROUGH: dict[object, Callable[[Node], bool]] = {
    **dict.fromkeys(
        (
            operator.getitem,
            ATEN.alias.default,
            ATEN.broadcast_to.default,
            ATEN.channel_shuffle.default,
            ATEN.chunk.default,
            ATEN.clone.default,
            ATEN.contiguous.default,
            ATEN.detach.default,
            ATEN.diagonal.default,
            ATEN.expand.default,
            ATEN.flatten.using_ints,
            ATEN.flip.default,
            ATEN.index.Tensor,
            ATEN.index_select.default,
            ATEN.max_pool1d.default,
            ATEN.max_pool2d.default,
            ATEN.max_pool3d.default,
            ATEN.moveaxis.int,
            ATEN.movedim.int,
            ATEN.movedim.intlist,
            ATEN.mT.default,
            ATEN.narrow.default,
            ATEN.numpy_T.default,
            ATEN.permute.default,
            ATEN.pixel_shuffle.default,
            ATEN.pixel_unshuffle.default,
            ATEN.ravel.default,
            ATEN.relu.default,
            ATEN.repeat.default,
            ATEN.repeat_interleave.self_int,
            ATEN.reshape.default,
            ATEN.select.int,
            ATEN.slice.Tensor,
            ATEN.split.sizes,
            ATEN.split.Tensor,
            ATEN.split_with_sizes.default,
            ATEN.squeeze.default,
            ATEN.squeeze.dim,
            ATEN.squeeze.dims,
            ATEN.stack.default,
            ATEN.swapaxes.default,
            ATEN.swapdims.default,
            ATEN.t.default,
            ATEN.tensor_split.sections,
            ATEN.tile.default,
            ATEN.transpose.int,
            ATEN.unbind.int,
            ATEN.unflatten.int,
            ATEN.unfold.default,
            ATEN.unsqueeze.default,
            ATEN.view.default,
        ),
        _always,
    ),
    ATEN.dropout.default: _drops_nothing,
    ATEN.pad.default: _pads_with_values,
}
#: Operators that select values of their input, and have no kernel on quantized tensors.
CHOOSES = {
    ATEN.amax.default,
    ATEN.amin.default,
    ATEN.gather.default,
    ATEN.masked_select.default,
    ATEN.max.default,
    ATEN.max.dim,
    ATEN.median.dim,
    ATEN.min.default,
    ATEN.min.dim,
    ATEN.roll.default,
    ATEN.sort.default,
    ATEN.take_along_dim.default,
    ATEN.topk.default,
    ATEN.tril.default,
    ATEN.triu.default,
}
#: Operators whose results are positions: where two values are close, rounding decides between others.
POSITIONS = {ATEN.argmax.default, ATEN.argmin.default, ATEN.argsort.default, ATEN.topk.default}


def preserves_values(node: Node) -> bool:
    """Return whether all values of the results of ``node`` are values of its inputs, or zero."""
    return node.target in PASSTHROUGH and PASSTHROUGH[node.target](node)


def moved_by(node: Node) -> Node | None:
    """Return the float input whose values, or zero, are the values of all results of ``node``; None if
    ``node`` computes, or joins several inputs."""
    if not (preserves_values(node) or node.target in CHOOSES):
        return None
    given = [each for each in node.all_input_nodes if _holds_floats(each.meta.get("val"))]
    return given[0] if len(given) == 1 else None


def _holds_floats(value: object) -> bool:
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    return isinstance(first, torch.Tensor) and first.dtype.is_floating_point


def _argument(node: Node, position: int, name: str, default: object) -> object:
    return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)


# The batch norm nodes of a captured graph, and the positions of their arguments.


#: Positions of aten.batch_norm's arguments.
GAMMA, BETA, RUNNING_MEAN, RUNNING_VAR, TRAINING, MOMENTUM, EPS = range(1, 8)


def batch_norm_nodes(graph_module: GraphModule) -> Iterator[tuple[str, Node]]:
    """Yield (path of the running mean, node) for every batch norm with a running mean."""
    for node in graph_module.graph.nodes:
        if node.target is torch.ops.aten.batch_norm.default and isinstance(node.args[RUNNING_MEAN], Node):
            yield str(node.args[RUNNING_MEAN].target), node


def batch_norms_by_path(graph_module: GraphModule) -> dict[str, str]:
    """Return the path of every batch norm -> the path of the op before it, empty if that is no module."""
    found = {}
    for _, node in batch_norm_nodes(graph_module):
        source = node.args[0]
        assert isinstance(source, Node)
        found[module_path_of(node)] = module_path_of(source)
    return found
