"""A linear layer whose input columns have several qparams: one kernel for each, and the sum of the results.

The output of a bidirectional layer is read like this. Legacy: FX gives both halves the qparams of the first,
which is wrong; ``quantized.linear`` supports only one set of input qparams.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from torchq_compat.lower.x86.engines import Engine, packing_for
from torchq_compat.lower.x86.kernels.kernel_base import Constant, Family, Floats, KernelCall, Refusal, Site
from torchq_compat.lower.x86.qdq_operands import (
    arguments_of,
    constant_of,
    quantized_weight,
    rank_of,
)
from torchq_compat.qspecs.qdq import DEQUANTIZE_PER_CHANNEL
from torchq_compat.support.quantized_tensors import (
    KERNELS,
    QUANTIZE_OP,
    channel_qparams,
    integers_of,
    is_per_channel,
    of_integers,
    of_integers_per_channel,
    qparams_of,
)

__all__ = ["FAMILY"]

ATEN = torch.ops.aten
WITH_FLOAT_RESULT = KERNELS.linear_with_input_q_dq_qweight_dq_output_fp32.default
#: More pieces would cost more than the kernels save.
MOST_PIECES = 4


@dataclass(frozen=True)
class _Piece:
    """Columns ``start`` to ``stop`` of the input, which have the same qparams."""

    start: int
    stop: int
    scale: float
    zero_point: int


def _split_linear(site: Site) -> KernelCall | Refusal | None:
    """Return the kernels of a linear after a per-channel dequantize along its last dimension; else None."""
    arguments = arguments_of(site.op)
    source = arguments["input"]
    if not isinstance(source, Node) or source.target is not DEQUANTIZE_PER_CHANNEL or site.qparams is None:
        return None
    pieces = _pieces(site, source)
    if pieces is None or len(pieces) > MOST_PIECES or site.qparams.dtype is not torch.uint8:
        return Refusal("its input has qparams that no kernels take side by side")
    weight = quantized_weight(site.graph_module, arguments["weight"])
    bias = constant_of(site.graph_module, arguments["bias"])
    if weight is None or weight.dtype is not torch.qint8 or (bias is None and arguments["bias"] is not None):
        return Refusal("its weight and bias are no constants of int8 and float32")
    try:
        packed = [_pack(weight, piece, None if piece.start else bias) for piece in pieces]
    except RuntimeError as cause:
        return Refusal(f"torch cannot pack its weight: {str(cause).splitlines()[0]}")
    total, *others = (_product(source, *each) for each in zip(pieces, packed, strict=True))
    for other in others:
        total = KernelCall(ATEN.add.Tensor, (total, other))
    if site.relu is not None:
        total = KernelCall(ATEN.relu.default, (total,))
    args = (total, site.qparams.scale, site.qparams.zero_point, torch.quint8)
    name = f"{len(pieces)} x {WITH_FLOAT_RESULT}"
    return KernelCall(QUANTIZE_OP, args, site.covered, name=name)


def _pieces(site: Site, dequantize: Node) -> list[_Piece] | None:
    """Return the pieces along the last dimension; None for another dimension or dtype."""
    _, scales_node, zero_points_node, axis, _, _, dtype = dequantize.args
    scales, zero_points = (constant_of(site.graph_module, each) for each in (scales_node, zero_points_node))
    rank = rank_of(site.op)
    if scales is None or zero_points is None or rank is None or axis != rank - 1 or dtype is not torch.uint8:
        return None
    all_qparams = enumerate(zip(scales.tolist(), zero_points.tolist(), strict=True))
    runs = (
        (qparams, [index for index, _ in run])
        for qparams, run in groupby(all_qparams, key=lambda each: each[1])
    )
    return [_Piece(run[0], run[-1] + 1, scale, int(zero_point)) for (scale, zero_point), run in runs]


def _pack(weight: Tensor, piece: _Piece, bias: Tensor | None) -> Any:
    """Pack the columns of ``piece`` for fbgemm, the only engine whose kernel returns floats."""
    columns = integers_of(weight)[:, piece.start : piece.stop].contiguous()
    if is_per_channel(weight):
        quantized = of_integers_per_channel(columns, *channel_qparams(weight), 0)
    else:
        quantized = of_integers(columns, *qparams_of(weight))
    with packing_for(Engine("fbgemm")):
        return KERNELS.linear_prepack.default(quantized, bias)


def _product(source: Node, piece: _Piece, packed: Any) -> KernelCall:
    """Call the kernel for the columns of ``piece``; its float result is one summand."""
    columns = KernelCall(ATEN.slice.Tensor, (Floats(source), -1, piece.start, piece.stop))
    return KernelCall(WITH_FLOAT_RESULT, (columns, piece.scale, piece.zero_point, Constant(packed)))


FAMILY = Family({ATEN.linear.default: _split_linear}, goes_first=True)
