"""QParams: the affine quantization parameters of a tensor, observed, loaded, or with a float zero point."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.fake_quantize import FakeQuantize
from torchao.quantization.pt2e.observer import ObserverBase

from torchq_compat.read import qdq
from torchq_compat.read.qdq import DEQUANTIZE_PER_CHANNEL
from torchq_compat.read.torch_ao_classes import recognised_by_torch_ao, take_settings
from torchq_compat.support.dtypes import as_dtype, dtype_range, plain_dtype
from torchq_compat.support.graph_nodes import constant_of, replace_node, source_of
from torchq_compat.support.process_state import is_exporting
from torchq_compat.support.quantized_tensors import has_float_qparams, is_per_channel, is_quantized
from torchq_compat.support.quantized_tensors import qparams_of as legacy_qparams

# QParams: the affine quantization parameters of a tensor, as frozen values.
#
# They convert floats to the integers of their dtype and back: ``q = clamp(round(x / scale) + zero_point)``,
# ``x = (q - zero_point) * scale``, with torch's ``quantized_decomposed`` operators.


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

    scales = property(lambda self: (self.scale,))
    zero_points = property(lambda self: (self.zero_point,))

    @classmethod
    def of_node(cls, node: Node) -> PerTensorQParams:
        """Read the qparams of a static per-tensor quantize or dequantize node."""
        scale, zero_point, quant_min, quant_max, dtype = node.args[1:6]
        return cls(scale, zero_point, quant_min, quant_max, dtype)  # type: ignore[arg-type]

    @classmethod
    def of_tensor(cls, value: Tensor) -> PerTensorQParams | None:
        """Read the qparams of a quantized tensor of torch.ao; None for any other, and for several qparams."""
        if not is_quantized(value) or is_per_channel(value) or has_float_qparams(value):
            return None
        dtype = plain_dtype(value.dtype)
        return cls(*legacy_qparams(value), *dtype_range(dtype), dtype)

    @classmethod
    def of_call(cls, node: Any, op: Any) -> PerTensorQParams | None:
        """Read the qparams of a call of ``op``, one of the two; None for any other value."""
        return cls.of_node(node) if isinstance(node, Node) and node.target is op else None

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
        if is_exporting():
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


def combined(axis: int, all_qparams: Sequence[PerTensorQParams | None], size: int) -> QParams | None:
    """Return the qparams of a tensor concatenated along ``axis`` from pieces with ``all_qparams``, each of
    ``size``; None if one is float.

    Equal qparams remain per-tensor, but for those of observers that have seen no data: a state with others
    may be loaded over them. Different qparams of one dtype become per-channel, so that nothing is
    requantized. Pieces of different dtypes have no common qparams: return None.
    """
    known = [qparams for qparams in all_qparams if qparams is not None]
    if len(known) != len(all_qparams):
        return None
    first = known[0]
    is_unseen = len(known) > 1 and (first.scale, first.zero_point) == (1.0, 0)
    if not is_unseen and known.count(first) == len(known):
        return first
    if len({(qparams.dtype, qparams.quant_min, qparams.quant_max) for qparams in known}) > 1:
        return None
    return PerChannelQParams(tuple((size, qparams) for qparams in known), axis)


# Qparams that were loaded, not observed: they are valid until the observer sees data again.
#
# A converted model of FX has the qparams but no longer the ranges they were computed from, and no range
# reproduces every scale bit for bit. So an observer keeps loaded qparams as two buffers, which take
# precedence over the qparams it computes.


SCALE, ZERO_POINT = "loaded_scale", "loaded_zero_point"
Qparams = tuple[Tensor, Tensor]


def hold_qparams(observer: nn.Module, scale: Tensor, zero_point: Tensor) -> None:
    """Make ``observer`` report ``scale`` and ``zero_point``, one or one for each channel, until it observes
    again. A weight observer keeps them as long as the weight lies on them."""
    release_qparams(observer)
    device = next((buffer.device for buffer in observer.buffers()), scale.device)
    observer.register_buffer(SCALE, scale.detach().to(device, copy=True).reshape(-1))
    observer.register_buffer(ZERO_POINT, zero_point.detach().to(device, copy=True).reshape(-1))
    if not getattr(observer, "observes_at_convert", False):
        observer.register_forward_pre_hook(_observes_again)


def release_qparams(observer: nn.Module) -> None:
    """Make ``observer`` report the qparams it observed."""
    for name in (SCALE, ZERO_POINT):
        observer._buffers.pop(name, None)
    for key in [key for key, hook in observer._forward_pre_hooks.items() if hook is _observes_again]:
        del observer._forward_pre_hooks[key]


def loaded_qparams(observer: nn.Module) -> Qparams | None:
    """Return the qparams loaded into ``observer``, each (n,); None if none were, or it observed since."""
    scale, zero_point = (observer._buffers.get(name) for name in (SCALE, ZERO_POINT))
    return None if scale is None or zero_point is None else (scale, zero_point)


def has_loaded_qparams(observer: nn.Module) -> bool:
    return loaded_qparams(observer) is not None


def qparams_of(observer: nn.Module) -> Qparams:
    """Return scale and zero point of ``observer``: the loaded ones, else those it observed."""
    if (loaded := loaded_qparams(observer)) is not None:
        return loaded
    scale, zero_point = observer.calculate_qparams()  # type: ignore[operator]
    return scale, zero_point


def is_on_loaded_qparams(observer: Any, weight: Tensor) -> bool:
    """Return whether the loaded qparams of ``observer`` represent every value of ``weight`` exactly."""
    loaded = loaded_qparams(observer)
    if loaded is None:
        return False
    axis = int(getattr(observer, "ch_axis", 0))
    shape = [-1 if dimension == axis else 1 for dimension in range(weight.dim())]
    scale, zero_point = (
        item.to(weight.device).reshape(shape if item.numel() > 1 else [1] * weight.dim()) for item in loaded
    )
    integers = torch.round(weight / scale + zero_point)
    return bool(torch.equal((integers - zero_point) * scale, weight))


@recognised_by_torch_ao
class FrozenObserver(ObserverBase):  # type: ignore[misc]
    """Takes the place of an observer while torchao converts, with its ``qparams``. ``limits`` is another
    range, for one scale for the whole tensor."""

    def __init__(self, observer: Any, qparams: Qparams, limits: tuple[int, int] | None = None) -> None:
        super().__init__(dtype=plain_dtype(observer.dtype), is_dynamic=False)
        take_settings(self, observer)
        self.qparams = qparams
        if limits is not None:
            self.quant_min, self.quant_max = limits
            self.qscheme = torch.per_tensor_affine

    def forward(self, x: Tensor) -> Tensor:
        return x

    def calculate_qparams(self, **_: Any) -> Qparams:
        return self.qparams


def adopt_loaded_qparams(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Give buffers for loaded qparams to the observers of ``model`` that have such qparams in ``state``, and
    remove them from all other observers."""
    for path, module in model.named_modules():
        scale, zero_point = (state.get(f"{path}.{name}") for name in (SCALE, ZERO_POINT))
        if isinstance(scale, Tensor) and isinstance(zero_point, Tensor):
            hold_qparams(module, scale, zero_point)
        elif has_loaded_qparams(module):
            release_qparams(module)


def _observes_again(observer: nn.Module, _args: Any) -> None:
    enabled = getattr(observer, "observer_enabled", None)
    if not isinstance(enabled, Tensor) or bool(enabled.any()):
        release_qparams(observer)


# Weights with float zero points, FX's scheme for embeddings: their integers are computed here.
#
# quantized_decomposed.quantize_per_channel computes ``round(x / scale) + zero_point`` and truncates the sum
# to an integer, up to one step below FX's ``round(x / scale + zero_point)``. So only the dequantize is put
# into the graph, by the ``convert`` method of the observer, which torchao's convert calls.


@recognised_by_torch_ao
class FloatQParamsFakeQuantize(FakeQuantize):  # type: ignore[misc]
    """torchao's FakeQuantize, which is converted to a folded integer weight."""

    def convert(self, model: GraphModule, observer_node: Node) -> None:
        """Replace ``observer_node``, which observes a weight of ``model``, by a folded integer weight."""
        scale, zero_point = self.calculate_qparams()
        fold_weight(model, observer_node, scale, zero_point, self)


def fold_weight(
    model: GraphModule, observer_node: Node, scale: Tensor, zero_point: Tensor, settings: Any
) -> None:
    """Replace ``observer_node`` by the dequantize of a folded integer weight.

    Args:
        scale: one per channel.
        zero_point: one per channel, as floats.
        settings: has ``ch_axis``, ``quant_min``, ``quant_max`` and ``dtype``.
    """
    source = source_of(observer_node)
    name = str(source.target).replace(".", "_")
    weight = constant_of(model, source).detach()
    axis, low, high = int(settings.ch_axis), int(settings.quant_min), int(settings.quant_max)
    shape = [-1 if i == axis else 1 for i in range(weight.dim())]

    def quantize(block: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        integers = torch.round(block / scale.view(shape) + zero_point.view(shape)).clamp(low, high)
        return integers.to(settings.dtype)

    constants = {
        f"{name}_quantized": qdq.in_blocks(quantize, weight, axis, scale, zero_point),
        f"{name}_scales": scale,
        f"{name}_zero_points": zero_point,
    }
    graph = model.graph
    with graph.inserting_before(observer_node):
        nodes = []
        for constant, value in constants.items():
            model.register_buffer(constant, value)
            nodes.append(graph.get_attr(constant))
        dequantize = graph.call_function(
            DEQUANTIZE_PER_CHANNEL,
            (*nodes, axis, low, high, settings.dtype),
        )
    replace_node(observer_node, dequantize)
