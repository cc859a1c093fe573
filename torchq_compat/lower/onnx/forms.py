"""Trace a q-dq graph for ``torch.onnx.export``, called by ``to_onnx`` or by the user: replace the operators
that it would write wrongly, or cannot write, by operators that it writes right.

- A quantize to a part of its dtype's range is clamped first: QuantizeLinear saturates at the dtype's bounds.
- Integers that QuantizeLinear does not have in the opset, float zero points and dynamic qparams are computed
  in floats.
- In a lookup in an integer table, only the rows that are looked up are dequantized: the optimizer of
  torch.onnx would fold the table into one of floats.
- A linear of floats by integers is made two-dimensional, for a Gemm: ONNX Runtime turns a MatMul there into
  MatMulNBits, which rounds the floats to 8 bits (34 to 43 dB in an LSTM of two bidirectional layers).
- The bias of a linear of integers by integers is subtracted: ONNX Runtime would turn an Add or a Gemm into
  QGemm, which rounds the bias to integers (42 dB in that LSTM, 36 dB in a loop around a GRUCell).
- So is the bias of a convolution if there are loops. ONNX Runtime's ``WeightBiasQuantization`` rounds it to
  32-bit integers, which changes some results by a step. In a feed-forward model that is little, and worth the
  integer kernel; before a loop over time each such step changes everything that follows: 29 to 33 dB in a
  DeepSpeech of GRUs.
- A ``squeeze`` that does nothing is left out: ONNX has no form for it.

Legacy: none.
"""

from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from torchq_compat.capture.opaque_calls import opaque_call_nodes
from torchq_compat.lower.export import with_size_rules
from torchq_compat.lower.integers.lowered_graph import share_state
from torchq_compat.model.graph_module import ConvertedGraphModule
from torchq_compat.model.quantized_interface import take_integers
from torchq_compat.model.state import dequantize_channels, look_up_rows
from torchq_compat.ops import those
from torchq_compat.read import qdq
from torchq_compat.recurrent.over_time import LoopShape, exporting_loops_as
from torchq_compat.support.dtypes import dtype_range

ATEN = torch.ops.aten
SCAN = torch.ops.higher_order.scan
#: The dtypes that QuantizeLinear has in the default opset of torch.onnx.
BYTES = (torch.uint8, torch.int8)
#: Those that it has from opset 21 on.
WITH_16_BITS = (*BYTES, torch.uint16, torch.int16)
#: The largest float32 that fits into an int32.
LARGEST = 2147483520


def run_for_onnx(model: ConvertedGraphModule, args: tuple[Any, ...]) -> Any:
    """Run ``model``, a q-dq graph, on operators that ONNX has, with loops over time rolled."""
    bound = take_integers(model.record.signature.bind(args, {}), model.input_qparams())
    edited = with_size_rules(model, bound)
    with exporting_loops_as(LoopShape.ROLLED), OnnxForms(BYTES, keeps_biases=bool(opaque_call_nodes(model))):
        return Interpreter(edited).run(*bound)


def in_onnx_forms(graph_module: GraphModule) -> GraphModule:
    """Return ``graph_module``, a q-dq graph, as one call that runs it on operators of opset 21."""
    keeps_biases = bool(opaque_call_nodes(graph_module))

    def run(*args: Any) -> Any:
        with OnnxForms(WITH_16_BITS, keeps_biases=keeps_biases):
            return Interpreter(graph_module).run(*args, enable_io_processing=False)

    graph = Graph()
    inputs = [graph.node_copy(node) for node in graph_module.graph.find_nodes(op="placeholder")]
    graph.output(graph.call_function(run, tuple(inputs)))
    graph.set_codegen(graph_module.graph._codegen)
    result = GraphModule(graph_module, graph)
    share_state(result, graph_module)  # torch.export looks for tensors in the module that it is given.
    return result


class _Table(NamedTuple):
    """The integers and qparams that a tensor was dequantized from."""

    integers: Tensor
    scales: Tensor
    zero_points: Tensor
    axis: int


class OnnxForms(TorchFunctionMode):
    """Replaces operators of ``quantized_decomposed`` by operators that ONNX has, inside loops too.

    Args:
        dtypes: the dtypes that QuantizeLinear has.
        keeps_biases: whether the biases of convolutions are separated.
    """

    def __init__(self, dtypes: Collection[torch.dtype], *, keeps_biases: bool) -> None:
        super().__init__()
        self.dtypes = dtypes
        self.keeps_biases = keeps_biases
        #: Dequantized tensor -> its source; None for per-tensor qparams.
        self._dequantized: Any = WeakTensorKeyDictionary()

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is SCAN:
            body, *remaining = args
            return func(self._around(body), *remaining, **kwargs)
        if func is ATEN.embedding.default:
            return self._embedding(*args, **kwargs)
        if func is ATEN.linear.default:
            return self._linear(*args, **kwargs)
        if (
            self.keeps_biases
            and func in those("convolution", "transposed")
            and len(args) > 2
            and args[2] is not None
        ):
            x, weight, bias, *settings = args
            result = func(x, weight, None, *settings, **kwargs)
            return result - (-bias).reshape(-1, *[1] * (weight.dim() - 2))
        forms = IN_ONNX if self._is_in_onnx(func, args) else FORMS
        result = forms.get(func, func)(*args, **kwargs)
        if func in those("squeeze") and result.dim() == args[0].dim():
            return args[0]
        if func is qdq.DEQUANTIZE_PER_CHANNEL:
            self._dequantized[result] = _Table(*args[:4])
        elif func is qdq.DEQUANTIZE and args[0].dtype in self.dtypes:
            self._dequantized[result] = None
        return result

    def _is_in_onnx(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Return whether QuantizeLinear and DequantizeLinear have the dtypes of ``func``."""
        if func is qdq.QUANTIZE:
            return args[5] in self.dtypes
        if func is qdq.DEQUANTIZE_PER_CHANNEL and args[2].dtype.is_floating_point:
            return False
        return func in (qdq.DEQUANTIZE, qdq.DEQUANTIZE_PER_CHANNEL) and args[0].dtype in self.dtypes

    def _around(self, body: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``body`` with this mode on: a scan traces its body with the mode off."""

        def with_forms(*args: Any) -> Any:
            with self:
                return body(*args)

        return with_forms

    def _embedding(self, weight: Tensor, indices: Tensor, *options: Any) -> Tensor:
        table = self._dequantized.get(weight)
        if table is None or table.axis != 0:
            tensor: Tensor = ATEN.embedding.default(weight, indices, *options)
            return tensor
        return look_up_rows(table.integers, table.scales, table.zero_points, indices)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        result: Tensor
        is_integer, has_integers = (item in self._dequantized for item in (x, weight))
        if not has_integers or (x.dim() < 3 and not is_integer):
            result = ATEN.linear.default(x, weight, bias)
        elif is_integer:
            result = ATEN.linear.default(x, weight)
            result = result if bias is None else result - (-bias)
        else:
            rows: Tensor = ATEN.linear.default(x.flatten(0, -2), weight, bias)
            result = rows.reshape(*x.shape[:-1], -1)
        return result


def _quantize_clamped(
    x: Tensor, scale: float, zero_point: int, quant_min: int, quant_max: int, dtype: torch.dtype
) -> Tensor:
    if (quant_min, quant_max) != dtype_range(dtype):
        low, high = ((bound - zero_point) * scale for bound in (quant_min, quant_max))
        x = x.clamp(low, high)
    integers: Tensor = qdq.QUANTIZE(x, scale, zero_point, quant_min, quant_max, dtype)
    return integers


def _quantize(
    x: Tensor, scale: float, zero_point: int, quant_min: int, quant_max: int, dtype: torch.dtype
) -> Tensor:
    scaled = torch.round(x * (1.0 / scale)) + float(zero_point)
    low, high = (float(max(quant_min, -(2**31))), float(min(quant_max, LARGEST)))
    return scaled.clamp(low, high).to(dtype)


def _dequantize(
    x: Tensor, scale: float, zero_point: int, *limits: Any, out_dtype: torch.dtype | None = None
) -> Tensor:
    result = (x.to(torch.float32) - float(zero_point)) * scale
    return result if out_dtype is None else result.to(out_dtype)


def _quantize_by_tensors(
    x: Tensor, scale: Tensor, zero_point: Tensor, quant_min: int, quant_max: int, dtype: torch.dtype
) -> Tensor:
    scaled = torch.round(x * scale.to(torch.float32).reciprocal()) + zero_point.to(torch.float32)
    return scaled.clamp(quant_min, quant_max).to(dtype)


def _dequantize_by_tensors(
    x: Tensor, scale: Tensor, zero_point: Tensor, *limits: Any, out_dtype: torch.dtype | None = None
) -> Tensor:
    return (x.to(torch.float32) - zero_point.to(torch.float32)) * scale.to(torch.float32)


def _choose_qparams(
    x: Tensor, quant_min: int, quant_max: int, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    low, high = x.min().clamp(max=0.0), x.max().clamp(min=0.0)
    scale = ((high - low) / float(quant_max - quant_min)).clamp(min=eps)
    zero_point = (quant_min - torch.round(low / scale)).clamp(quant_min, quant_max)
    return scale.to(torch.float64), zero_point.to(torch.int64)


#: Operator -> what computes it in floats, or for any dtype.
FORMS: dict[Any, Callable[..., Any]] = {
    qdq.QUANTIZE: _quantize,
    qdq.DEQUANTIZE: _dequantize,
    qdq.QUANTIZE_DYNAMIC: _quantize_by_tensors,
    qdq.DEQUANTIZE_DYNAMIC: _dequantize_by_tensors,
    qdq.CHOOSE_QPARAMS: _choose_qparams,
    qdq.DEQUANTIZE_PER_CHANNEL: dequantize_channels,
    qdq.CONVERT_DTYPE: Tensor.to,
}
#: The same for dtypes that ONNX has.
IN_ONNX: dict[Any, Callable[..., Any]] = {qdq.QUANTIZE: _quantize_clamped}
