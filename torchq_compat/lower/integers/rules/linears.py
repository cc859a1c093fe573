"""Linear layers: static int8 on the kernels of torch, all others on this package's own product."""

import operator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch.fx import Node

from torchq_compat.lower.integers.lowered_graph import Family, Kernel, LoweredGraph, Refusal
from torchq_compat.lower.integers.operators import LINEAR
from torchq_compat.lower.integers.qdq_graph import OpSite, constant_of, integers_at, rank_of
from torchq_compat.lower.integers.rules.convolutions import Weight, bias_fault, ends, weight_of
from torchq_compat.read import qdq
from torchq_compat.read.qparams import PerTensorQParams
from torchq_compat.recurrent.kernel.direct_calls import LINEAR_OPERATOR, LinearWeight, linear_call
from torchq_compat.recurrent.kernel.program import ColumnQParams, DynamicQParams
from torchq_compat.support.dtypes import KERNEL_DTYPES

# Linear layers with int8 weights on 8-bit activations. Legacy: ``nnq.Linear``, ``nniq.LinearReLU``.


def _static_linear(site: OpSite) -> Kernel | Refusal | None:
    weight = weight_of(site)
    if not isinstance(weight, Weight):
        return weight
    source = integers_at(site.arguments["input"])
    fault = bias_fault(site) if source is not None else Refusal("its input is not quantized to 8 bits")
    if source is None or fault is not None:
        return fault

    def write(lowered: LoweredGraph) -> Node:
        numbers, kind = ends(site)
        parts = (weight.values, weight.write_scales(lowered), site.arguments["bias"])
        return lowered.call(LINEAR, *source.arguments, *parts, *numbers, kind)

    return Kernel(str(LINEAR), write)


LINEARS = Family({torch.ops.aten.linear.default: _static_linear})


# Linear layers on this package's own product: dynamic activations, several qparams along the columns,
# weights with zero points; and linear layers with weights in float16, which run in floats.
#
# Legacy: ``nnqd.Linear``, ``nniqd.LinearReLU``. FX gives both halves of the output of a bidirectional layer
# the qparams of the first, which is wrong: here every column has its own.


ATEN = torch.ops.aten
#: More qparams along the columns would cost more than the integer product saves.
MOST_PIECES = 4


@dataclass(frozen=True)
class _Weight:
    """An int8 weight and its bias, and the nodes that read them, in the order in which the operator does."""

    tensors: LinearWeight
    nodes: tuple[Node, ...]


def _own_product(site: OpSite) -> Kernel | Refusal | None:
    dequantize = site.arguments["input"]
    if not isinstance(dequantize, Node):
        return None
    half = _half_linear(site)
    weight = _weight(site) if half is None else None
    if weight is None:
        return half
    columns: ColumnQParams | None = None
    source, dynamic = next(iter(dequantize.args), None), None
    if dequantize.target is qdq.DEQUANTIZE_DYNAMIC:
        assert isinstance(source, Node)
        dynamic = _dynamic(source)
        columns = ((weight.tensors.values.shape[1], None),)
        source = source.args[0]
    else:
        columns = _columns(site, dequantize, weight.tensors.values.shape[1])
    if columns is None or (dynamic is not None and dynamic.dtype not in KERNEL_DTYPES):
        return None
    output = site.result.qparams
    if output is not None and output.dtype.is_signed and output.quant_min >= 0:
        return Refusal("the operator takes integers that are never negative for uint8")
    call = linear_call(weight.tensors, columns, dynamic=dynamic, output=output)
    return Kernel(
        f"{LINEAR_OPERATOR}, one linear", lambda lowered: _written(lowered, site, source, weight, call)
    )


def _weight(site: OpSite) -> _Weight | None:
    """Return an int8 weight and its bias, if both are constants."""
    dequantize, bias_node = site.arguments["weight"], site.arguments["bias"]
    if not qdq.is_dequantize(dequantize) or rank_of(site.op) is None:
        return None
    values, bias = (constant_of(site.graph_module, item) for item in (dequantize.args[0], bias_node))
    if values is None or values.dtype is not torch.int8 or (bias is None) != (bias_node is None):
        return None
    if bias is not None and bias.dtype is not torch.float32:
        return None
    behind = () if bias is None else (bias_node,)
    if dequantize.target is qdq.DEQUANTIZE:
        scale, zero_point = dequantize.args[1:3]
        tensors = LinearWeight(values, None, None, bias, (float(scale), int(zero_point)))
        return _Weight(tensors, (dequantize.args[0], *behind))
    scales, zero_points = (constant_of(site.graph_module, arg) for arg in dequantize.args[1:3])
    if scales is None or zero_points is None or dequantize.args[3] != 0 or zero_points.is_floating_point():
        return None
    return _Weight(LinearWeight(values, scales, zero_points, bias), (*dequantize.args[:3], *behind))


def _dynamic(quantize: Any) -> DynamicQParams:
    """Return how the qparams are chosen that ``quantize`` reads."""
    _, scale, _, quant_min, _, dtype = quantize.args
    _, _, high, smallest_scale, _ = scale.args[0].args
    return DynamicQParams(smallest_scale, high, quant_min, quantize.args[4], dtype)


def _columns(site: OpSite, dequantize: Node, width: int) -> ColumnQParams | None:
    if (source := integers_at(dequantize)) is not None:
        return ((width, source.qparams),)
    if dequantize.target is not qdq.DEQUANTIZE_PER_CHANNEL:
        return None
    _, scales_node, zero_points_node, axis, low, high, dtype = dequantize.args
    scales, zero_points = (constant_of(site.graph_module, item) for item in (scales_node, zero_points_node))
    rank = rank_of(site.op)
    if scales is None or zero_points is None or rank is None:
        return None
    if axis != rank - 1 or dtype not in KERNEL_DTYPES:
        return None
    runs = [
        (len(list(run)), PerTensorQParams(scale, int(zero), int(low), int(high), dtype))  # type: ignore[arg-type]
        for (scale, zero), run in groupby(zip(scales.tolist(), zero_points.tolist(), strict=True))
    ]
    return tuple(runs) if len(runs) <= MOST_PIECES else None


def _written(lowered: LoweredGraph, site: OpSite, x: Any, weight: _Weight, call: tuple[Any, ...]) -> Node:
    """Write the operator with the input as rows, and give the result the leading sizes of the input."""
    rank = rank_of(site.op)
    assert rank is not None
    outputs, inputs = weight.tensors.values.shape
    rows = x if rank == 2 else lowered.call(ATEN.reshape.default, x, [-1, inputs])
    states, _, program, boundary, *others, _ = call
    # The operator looks at the weights at each call: they may be written to.
    arguments = (rows, states, list(weight.nodes), lowered.constant(program), boundary, *others, -1)
    result = lowered.call(operator.getitem, lowered.call(LINEAR_OPERATOR, *arguments), 0)
    if rank == 2:
        return result
    sizes = [lowered.call(ATEN.sym_size.int, x, position) for position in range(rank - 1)]
    return lowered.call(ATEN.reshape.default, result, [*sizes, outputs])


def _half_linear(site: OpSite) -> Kernel | None:
    """Return the linear in floats of a weight that was rounded to float16.

    As in FX it gets the input without its rounding, which is nearer to the float model.
    """
    weight_node = _before_half(site.arguments["weight"])
    weight, source = constant_of(site.graph_module, weight_node), _before_half(site.arguments["input"])
    if weight is None or source is None:
        return None
    rounded = weight.to(torch.float16).to(torch.float32)

    def write(lowered: LoweredGraph) -> Node:
        return lowered.call(ATEN.linear.default, source, lowered.constant(rounded), site.arguments["bias"])

    name = f"{ATEN.linear.default} in floats, its weight rounded once"
    return Kernel(name, write, value=site.op, is_as_reference=False)


def _before_half(node: Any) -> Node | None:
    """Return the value that ``node`` rounds to float16; None if ``node`` does no such rounding."""
    for dtype in (torch.float32, torch.float16):
        if not isinstance(node, Node) or node.target is not qdq.CONVERT_DTYPE or node.args[1] is not dtype:
            return None
        node = node.args[0]
    return node if isinstance(node, Node) else None


OWN_PRODUCTS = Family({ATEN.linear.default: _own_product})
