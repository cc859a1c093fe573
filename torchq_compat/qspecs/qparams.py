"""QParams: the affine quantization parameters of a tensor, as frozen values.

They convert floats to the integers of their dtype and back: ``q = clamp(round(x / scale) + zero_point)``,
``x = (q - zero_point) * scale``, with torch's ``quantized_decomposed`` operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Node

from torchq_compat.qspecs import qdq
from torchq_compat.support.dtypes import as_dtype

__all__ = ["PerChannelQParams", "PerTensorQParams", "QParams", "combine_along", "covering", "q_dq"]


@dataclass(frozen=True)
class PerTensorQParams:
    """One scale and zero point for the whole tensor."""

    quantize_op: ClassVar[Any] = qdq.QUANTIZE
    dequantize_op: ClassVar[Any] = qdq.DEQUANTIZE

    scale: float
    zero_point: int
    quant_min: int
    quant_max: int
    dtype: torch.dtype

    @classmethod
    def of_node(cls, node: Node) -> PerTensorQParams:
        """Read the qparams of a static per-tensor quantize or dequantize node."""
        scale, zero_point, quant_min, quant_max, dtype = node.args[1:6]
        return cls(scale, zero_point, quant_min, quant_max, dtype)  # type: ignore[arg-type]

    def arguments(self, *_: Any) -> tuple[float, int, int, int, torch.dtype]:
        """Return the arguments of quantize and dequantize that follow the tensor."""
        return self.scale, self.zero_point, self.quant_min, self.quant_max, self.dtype

    def quantize(self, x: Tensor) -> Tensor:
        """Quantize floats to integers of ``dtype``."""
        q: Tensor = qdq.QUANTIZE(as_dtype(x, torch.float32), *self.arguments())
        return q

    def dequantize(self, q: Tensor, out_dtype: torch.dtype = torch.float32) -> Tensor:
        """Dequantize integers to floats of ``out_dtype``."""
        x: Tensor = qdq.DEQUANTIZE(q, *self.arguments())
        return as_dtype(x, out_dtype)

    @property
    def is_kept_by_float32(self) -> bool:
        """Whether every integer survives a conversion to float32 and back."""
        return self.quant_max - self.quant_min < 2**20


def q_dq(x: Tensor, qparams: PerTensorQParams | None) -> Tensor:
    """Return ``x``, which lies on ``qparams``, after a quantize and a dequantize that change no value;
    unchanged if ``qparams`` is None, or if the pair could change a value."""
    if qparams is None or not qparams.is_kept_by_float32:
        return x
    return qparams.dequantize(qparams.quantize(x), x.dtype)


@dataclass(frozen=True)
class PerChannelQParams:
    """Per-tensor qparams, of one dtype and range, for each index of dimension ``axis``.

    Attributes:
        runs: (number of indices, their qparams), in the order of the indices.
    """

    quantize_op: ClassVar[Any] = qdq.QUANTIZE_PER_CHANNEL
    dequantize_op: ClassVar[Any] = qdq.DEQUANTIZE_PER_CHANNEL

    runs: tuple[tuple[int, PerTensorQParams], ...]
    axis: int

    dtype = property(lambda self: self.runs[0][1].dtype)
    quant_min = property(lambda self: self.runs[0][1].quant_min)
    quant_max = property(lambda self: self.runs[0][1].quant_max)

    @property
    def scales(self) -> tuple[float, ...]:
        """The scale of every index."""
        return tuple(qparams.scale for size, qparams in self.runs for _ in range(size))

    @property
    def zero_points(self) -> tuple[int, ...]:
        """The zero point of every index."""
        return tuple(qparams.zero_point for size, qparams in self.runs for _ in range(size))

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return ``scales`` (float32) and ``zero_points`` (int64), each of shape (channels,)."""
        runs = [(size, qparams.scale, qparams.zero_point) for size, qparams in self.runs]
        # A traced torch.tensor call could not be exported a second time.
        scales = [torch.full((n,), scale, dtype=torch.float32, device=device) for n, scale, _ in runs]
        zero_points = [torch.full((n,), zero, dtype=torch.int64, device=device) for n, _, zero in runs]
        return torch.cat(scales), torch.cat(zero_points)

    def arguments(
        self, name: str, constant: Callable[[str, Tensor], Any], device: torch.device
    ) -> tuple[Any, ...]:
        """Return the arguments of quantize and dequantize that follow the tensor. ``constant`` makes the
        tensor arguments, on ``device``, from a name that begins with ``name`` and the value."""
        scales, zero_points = self.tensors(device)
        tensors = constant(f"{name}_scales", scales), constant(f"{name}_zero_points", zero_points)
        return *tensors, self.axis, self.quant_min, self.quant_max, self.dtype

    def quantize(self, x: Tensor) -> Tensor:
        """Quantize floats to integers of ``dtype``."""
        scales, *others = self.arguments("", _itself, x.device)
        if torch.compiler.is_exporting():
            # ExecuTorch's kernel stops the process at other dtypes. Values on the steps do not change.
            scales = scales.to(torch.float64)
        q: Tensor = qdq.QUANTIZE_PER_CHANNEL(as_dtype(x, torch.float32), scales, *others)
        return q

    def dequantize(self, q: Tensor, out_dtype: torch.dtype = torch.float32) -> Tensor:
        """Dequantize integers to floats of ``out_dtype``."""
        x: Tensor = qdq.DEQUANTIZE_PER_CHANNEL(q, *self.arguments("", _itself, q.device))
        return as_dtype(x, out_dtype)


def _itself(_: str, value: Tensor) -> Tensor:
    return value


QParams = PerTensorQParams | PerChannelQParams


def covering(all_qparams: Sequence[PerTensorQParams]) -> PerTensorQParams:
    """Return qparams over the same integers whose range covers the ranges of ``all_qparams``."""
    low, high = all_qparams[0].quant_min, all_qparams[0].quant_max
    smallest = min((low - qparams.zero_point) * qparams.scale for qparams in all_qparams)
    largest = max((high - qparams.zero_point) * qparams.scale for qparams in all_qparams)
    scale = (largest - smallest) / (high - low)
    zero_point = max(low, min(high, round(low - smallest / scale)))
    return replace(all_qparams[0], scale=scale, zero_point=zero_point)


def combine_along(axis: int, pieces: list[tuple[PerTensorQParams, int]]) -> QParams | None:
    """Return the qparams of a tensor concatenated from ``pieces`` along ``axis``; each piece is (qparams,
    size along ``axis``).

    Equal qparams remain per-tensor. Different qparams of one dtype become per-channel, so that nothing is
    requantized. Pieces of different dtypes have no common qparams: return None.
    """
    first = pieces[0][0]
    if all(qparams == first for qparams, _ in pieces):
        return first
    if any(
        (g.dtype, g.quant_min, g.quant_max) != (first.dtype, first.quant_min, first.quant_max)
        for g, _ in pieces
    ):
        return None
    return PerChannelQParams(tuple((size, qparams) for qparams, size in pieces), axis)
