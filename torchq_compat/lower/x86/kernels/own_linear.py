"""Linear layers on this package's own matrix product, which accumulates in 32 bits on every CPU.

Used if the engine in use has no kernels on this machine or is qnnpack, or if dynamic activations have a range
at which torch's kernels may saturate. Legacy: ``nnq.Linear``, ``nniq.LinearReLU``, ``nnqd.Linear``.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from torchq_compat.custom_modules.recurrent.native.build import kernel_build
from torchq_compat.custom_modules.recurrent.native.columns import ColumnQParams
from torchq_compat.custom_modules.recurrent.native.linear_calls import (
    LINEAR_OPERATOR,
    LinearCall,
    LinearWeight,
    linear_call,
)
from torchq_compat.custom_modules.recurrent.native.program import DynamicQParams
from torchq_compat.lower.x86.engines import X86_ENGINES, decide_engine, has_own_products
from torchq_compat.lower.x86.kernels.kernel_base import (
    Constant,
    Family,
    Floats,
    KernelCall,
    Quantized,
    Refusal,
    Site,
)
from torchq_compat.lower.x86.qdq_operands import arguments_of, constant_of, has_kernels, rank_of
from torchq_compat.qspecs.dynamic_qparams import ENGINES_OF_REDUCED_RANGE
from torchq_compat.qspecs.qdq import (
    DEQUANTIZE,
    DEQUANTIZE_DYNAMIC,
    DEQUANTIZE_PER_CHANNEL,
    QUANTIZE,
    QUANTIZE_PER_CHANNEL,
    is_dequantize,
)
from torchq_compat.qspecs.qparams import PerTensorQParams
from torchq_compat.support.dtypes import KERNEL_DTYPES, dtype_range
from torchq_compat.support.quantized_tensors import INTEGERS_OP, OF_INTEGERS_OP

__all__ = ["FAMILY", "own_dynamic_linear"]

ATEN = torch.ops.aten
#: More qparams along the columns would cost more than the integer product saves.
MOST_PIECES = 4
NAME = "torchq_compat_native.recurrent, one linear"


@dataclass(frozen=True)
class _Input:
    """The input of a linear.

    Attributes:
        values: the values of the graph.
        argument: what the product gets for them, integers or floats.
        columns: the qparams of its columns.
    """

    values: Quantized | Floats
    argument: Quantized | Floats | KernelCall
    columns: ColumnQParams

    @property
    def comes_as_integers(self) -> bool:
        return isinstance(self.values, Quantized)


def _linear(site: Site) -> KernelCall | Refusal | None:
    """Return the kernel of a linear for which the engine has no kernel as fast and as exact."""
    dynamic = own_dynamic_linear(site)
    if dynamic is not None:
        return dynamic
    engine = decide_engine()
    if not has_own_products() or (engine.has_kernels and engine.name in X86_ENGINES):
        return None
    arguments = arguments_of(site.op)
    weight = _weight(site, arguments)
    source = _static_input(site, arguments["input"]) if weight is not None else None
    if weight is None or source is None or not kernel_build().is_loaded:
        return None
    if site.qparams is None or not source.comes_as_integers:
        call = linear_call(weight, source.columns, relu=site.relu is not None)
        return _returning_floats(site, source, call)
    call = linear_call(weight, source.columns, relu=site.relu is not None, output=site.qparams)
    result = _called(site, source, call)
    args = (result, site.qparams.scale, site.qparams.zero_point)
    return KernelCall(OF_INTEGERS_OP, args, site.covered, name=NAME)


def own_dynamic_linear(site: Site) -> KernelCall | Refusal | None:
    """Return the kernel of a linear after choose_qparams, quantize and dequantize, if torch's kernel may
    saturate or does not exist."""
    arguments = arguments_of(site.op)
    dequantize = arguments["input"]
    if not isinstance(dequantize, Node) or dequantize.target is not DEQUANTIZE_DYNAMIC:
        return None
    if not has_own_products():
        return None
    quantize: Any = dequantize.args[0]
    source, scale, _, quant_min, quant_max, dtype = quantize.args
    _, low, high, smallest_scale, _ = scale.args[0].args
    engine = decide_engine()
    may_saturate = (low, high) == dtype_range(dtype) and engine.name in ENGINES_OF_REDUCED_RANGE
    if engine.has_kernels and engine.name in X86_ENGINES and not may_saturate:
        return None
    weight = _weight(site, arguments)
    if weight is None or dtype not in KERNEL_DTYPES or low != quant_min or not kernel_build().is_loaded:
        return None
    chosen = DynamicQParams(smallest_scale, high, quant_min, quant_max, dtype)
    columns = ((weight.values.shape[1], None),)
    call = linear_call(weight, columns, dynamic=chosen, relu=site.relu is not None)
    return _returning_floats(site, _Input(Floats(source), Floats(source), columns), call)


def _weight(site: Site, arguments: dict[str, Any]) -> LinearWeight | None:
    """Return an int8 weight and its bias, if both are constants."""
    dequantize, bias_node = arguments["weight"], arguments["bias"]
    if not is_dequantize(dequantize) or rank_of(site.op) is None:
        return None
    values, bias = (constant_of(site.graph_module, each) for each in (dequantize.args[0], bias_node))
    if values is None or values.dtype is not torch.int8 or (bias is None) != (bias_node is None):
        return None
    if bias is not None and bias.dtype is not torch.float32:
        return None
    if dequantize.target is DEQUANTIZE:
        scale, zero_point = dequantize.args[1:3]
        return LinearWeight(_kept(values), None, None, _kept(bias), (float(scale), int(zero_point)))
    scales, zero_points = (constant_of(site.graph_module, each) for each in dequantize.args[1:3])
    if scales is None or zero_points is None or dequantize.args[3] != 0 or zero_points.is_floating_point():
        return None
    return LinearWeight(*(_kept(each) for each in (values, scales, zero_points, bias)))


def _kept(tensor: Tensor | None) -> Any:
    """Return ``tensor`` without gradients, not copied: the model is lowered again when it is written to."""
    return None if tensor is None else tensor.detach().contiguous()


def _static_input(site: Site, dequantize: Any) -> _Input | None:
    """Return an input with 8-bit qparams: a quantized tensor where the graph has one, else floats that the
    product quantizes."""
    if not isinstance(dequantize, Node):
        return None
    qparams = site.qparams_of(dequantize)
    if qparams is not None:
        values = Quantized(dequantize)
        return _Input(values, KernelCall(INTEGERS_OP, (values,)), ((_width(site), qparams),))
    columns = _columns(site, dequantize)
    if columns is None:
        return None
    floats = Floats(_before_quantize(dequantize))
    return _Input(floats, floats, columns)


def _width(site: Site) -> int:
    values = constant_of(site.graph_module, arguments_of(site.op)["weight"].args[0])
    assert values is not None
    return int(values.shape[1])


def _columns(site: Site, dequantize: Node) -> ColumnQParams | None:
    if dequantize.kwargs:
        return None
    if dequantize.target is DEQUANTIZE:
        qparams = PerTensorQParams.of_node(dequantize)
        return ((_width(site), qparams),) if has_kernels(qparams) else None
    if dequantize.target is not DEQUANTIZE_PER_CHANNEL:
        return None
    _, scales_node, zero_points_node, axis, low, high, dtype = dequantize.args
    scales, zero_points = (constant_of(site.graph_module, each) for each in (scales_node, zero_points_node))
    rank = rank_of(site.op)
    if (
        scales is None
        or zero_points is None
        or rank is None
        or axis != rank - 1
        or dtype not in KERNEL_DTYPES
    ):
        return None
    runs = [
        (len(list(run)), PerTensorQParams(scale, int(zero), int(low), int(high), dtype))  # type: ignore[arg-type]
        for (scale, zero), run in groupby(zip(scales.tolist(), zero_points.tolist(), strict=True))
    ]
    return tuple(runs) if len(runs) <= MOST_PIECES else None


def _before_quantize(dequantize: Node) -> Node:
    """Return the floats before the q-dq pair that ``dequantize`` ends, or ``dequantize`` itself if its
    integers are not from such a pair."""
    source = dequantize.args[0]
    assert isinstance(source, Node)
    is_pair = source.target in (QUANTIZE, QUANTIZE_PER_CHANNEL) and source.args[1:] == dequantize.args[1:]
    before = source.args[0] if is_pair else dequantize
    assert isinstance(before, Node)
    return before


def _returning_floats(site: Site, source: _Input, call: LinearCall) -> KernelCall:
    return replace(_called(site, source, call), covers=site.covered, returns_floats=True, name=NAME)


def _called(site: Site, source: _Input, call: LinearCall) -> KernelCall:
    """Call the operator with the input as rows, and give the result the leading sizes of the input."""
    rank = rank_of(site.op)
    if rank == 2:
        return _product(source.argument, call)
    assert rank is not None
    outputs, inputs = call.weights[0].shape
    sizes = [KernelCall(ATEN.sym_size.int, (source.values, position)) for position in range(rank - 1)]
    rows = KernelCall(ATEN.reshape.default, (source.argument, [-1, inputs]))
    return KernelCall(ATEN.reshape.default, (_product(rows, call), [*sizes, outputs]))


def _product(x: Any, call: LinearCall) -> KernelCall:
    states, weights, program, *others = call.behind_x()
    constants = [Constant(weight) for weight in weights]
    results = KernelCall(LINEAR_OPERATOR, (x, states, constants, Constant(program), *others))
    return KernelCall(operator.getitem, (results, 0))  # type: ignore[arg-type]


FAMILY = Family({ATEN.linear.default: _linear}, goes_first=True, is_of_engine=False)
