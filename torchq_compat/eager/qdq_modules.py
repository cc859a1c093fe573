"""The modules of a converted eager model: at the paths of the float ones, each computes q-dq of its result.

Legacy: ``torch.ao.nn.quantized``. A class here has the name, the public attributes and the ``weight()`` and
``bias()`` of its counterpart there. Values are floats on a grid (see ``grid``), weights are plain integers
that every call dequantizes; exported, that is the graph that ``convert_pt2e`` makes.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partialmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchq_compat.eager.grid import active, as_quantize_per_tensor, grid_of, paused, put_on
from torchq_compat.errors import ConvertError
from torchq_compat.model.state import Numbers, numbers_of_qparams
from torchq_compat.read import qdq
from torchq_compat.read.observer_classes import searched_qparams
from torchq_compat.read.qparams import PerTensorQParams, has_loaded_qparams
from torchq_compat.read.qparams import qparams_of as observed
from torchq_compat.support import quantized_tensors, torch_ao
from torchq_compat.support.dtypes import dtype_range, is_integer, plain_dtype
from torchq_compat.support.process_state import is_compiling
from torchq_compat.support.user_warnings import warn_user

#: Types of a float module's attributes that are settings.
SETTINGS = (int, float, str, bool, tuple, type(None))
QPARAMS = ("scale", "zero_point")


def observed_qparams(observer: Any, place: str) -> PerTensorQParams:
    """Return the qparams of the values that ``observer`` saw, over the whole range of its dtype.

    Raises:
        ConvertError: the observer has no qparams that integers can have.
    """
    dtype = plain_dtype(observer.dtype)
    if not is_integer(dtype):
        raise ConvertError.of("TQ905.no_integers", place=place, dtype=observer.dtype)
    is_histogram = type(observer) is torch_ao.HistogramObserver and bool(observer.min_val.isfinite())
    searches = is_histogram and not has_loaded_qparams(observer)
    scale, zero_point = searched_qparams(observer) if searches else observed(observer)
    if scale.numel() != 1 or not bool(scale.isfinite().all()):
        raise ConvertError.of("TQ905.no_scale", place=place)
    return PerTensorQParams(float(scale), int(zero_point), *dtype_range(dtype), dtype)


#: The classes of torch.ao that save nothing: a model that is loaded keeps its own qparams.
WITHOUT_STATE = ("ELU", "PReLU", "Sigmoid", "Softmax")


class OnGrid(nn.Module):
    """Base of the modules whose results are rounded to qparams of their own.

    Attributes:
        output: the qparams of the results.
        place: the path in the converted model, for messages.
        has_seen_data: whether ``output`` is of data, or was told to be of none.
    """

    output: PerTensorQParams
    place = ""
    has_seen_data = True
    scale = property(lambda self: self.output.scale)
    zero_point = property(lambda self: self.output.zero_point)

    def _get_name(self) -> str:
        return f"Quantized{type(self).__name__}"

    def compute(self, *args: Any) -> Tensor:
        """Return the result in floats, before it is rounded."""
        raise NotImplementedError

    def forward(self, *args: Any) -> Tensor:
        """Return the result on ``output``."""
        return self._rounded(self.compute, *args)

    def _rounded(self, compute: Callable[..., Tensor], *args: Any) -> Tensor:
        with paused():
            return put_on(compute(*map(quantized_tensors.as_float, args)), self.output)

    def numbers_in_state(self) -> dict[str, Numbers]:
        return numbers_of_qparams(*QPARAMS, (self.output.quant_min, self.output.quant_max), (1,))

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}scale"] = torch.tensor(self.output.scale, dtype=torch.float64)
        destination[f"{prefix}zero_point"] = torch.tensor(self.output.zero_point)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        if type(self).__name__ in WITHOUT_STATE and not any(name.startswith(prefix) for name in state_dict):
            return
        given = [state_dict.pop(f"{prefix}{name}", None) for name in QPARAMS]
        super()._load_from_state_dict(state_dict, prefix, *others)
        scale, zero_point = given
        if scale is None or zero_point is None:
            others[2].extend(f"{prefix}{name}" for name, x in zip(QPARAMS, given, strict=True) if x is None)
            return
        self.output = replace(self.output, scale=float(scale), zero_point=int(zero_point))
        self.has_seen_data = True

    def extra_repr(self) -> str:
        own = super().extra_repr()
        return ", ".join(filter(None, [own, f"scale={self.scale}, zero_point={self.zero_point}"]))


class Quantize(OnGrid):
    """Rounds floats to a grid: what a QuantStub becomes. Its qparams are tensors, as torch.ao's."""

    scale = property(lambda self: torch.tensor([self.output.scale]))
    zero_point = property(lambda self: torch.tensor([self.output.zero_point]))

    def _get_name(self) -> str:
        return "Quantize"

    def compute(self, *args: Any) -> Tensor:
        (x,) = args
        return as_quantize_per_tensor(x, self.output)


class DeQuantize(nn.Module):
    """Hands floats out whose grid is no longer known: what a DeQuantStub becomes."""

    def _get_name(self) -> str:
        return "DeQuantize"

    def forward(self, x: Any) -> Any:
        """Return ``x`` as floats."""
        with paused():
            return quantized_tensors.as_float(x) if quantized_tensors.is_quantized(x) else x.clone()


class QFunctional(OnGrid):
    """The operations of a FloatFunctional, with results on its grid."""

    def __init__(self) -> None:
        super().__init__()
        self.activation_post_process = nn.Identity()

    def _rounded(self, compute: Callable[..., Tensor], *args: Any) -> Tensor:
        if not self.has_seen_data:
            self.has_seen_data = True
            warn_user("TQ405", count=1, observers=self.place)
        return super()._rounded(compute, *args)

    add = partialmethod(_rounded, torch.add)
    mul = partialmethod(_rounded, torch.mul)
    matmul = partialmethod(_rounded, torch.matmul)
    add_relu = partialmethod(_rounded, lambda x, y: torch.relu(torch.add(x, y)))

    def cat(self, x: Sequence[Tensor], dim: int = 0) -> Tensor:
        """Return the tensors of ``x`` in a row."""
        return self._rounded(lambda *tensors: torch.cat(tensors, dim=dim), *x)

    def add_scalar(self, x: Tensor, y: float) -> Tensor:
        """Return x + y on the grid of ``x``, moved by the number of steps nearest to ``y``."""
        with paused():
            grid = grid_of(x)
            if grid is None:
                return torch.add(quantized_tensors.as_float(x), y)
            zero_point = grid.zero_point - round(y / grid.scale)
            end = min(max(zero_point, grid.quant_min), grid.quant_max)
            if end == zero_point:
                moved = replace(grid, zero_point=zero_point)
                return put_on(torch.add(x, (grid.zero_point - zero_point) * grid.scale), moved)
            # The range does not hold zero any more: the kernel widens it until it does.
            far = grid.quant_max - zero_point if end == grid.quant_min else zero_point - grid.quant_min
            wider = replace(grid, scale=grid.scale * far / (grid.quant_max - grid.quant_min), zero_point=end)
            return put_on(torch.add(x, y), wider)

    def mul_scalar(self, x: Tensor, y: float) -> Tensor:
        """Return x * y; the integers stay, or are mirrored."""
        with paused():
            grid = grid_of(x)
            if grid is None:
                return torch.mul(quantized_tensors.as_float(x), y)
            if y == 0:
                return put_on(torch.zeros_like(x), replace(grid, scale=1.0, zero_point=0))
            mirrored = grid.zero_point if y > 0 else grid.quant_max + grid.quant_min - grid.zero_point
            return put_on(torch.mul(x, y), replace(grid, scale=grid.scale * abs(y), zero_point=mirrored))


class IntegerWeight(nn.Module):
    """Base of the modules with an integer weight: per channel, also if all channels have one scale.

    Attributes:
        integers: the weight.
        weight_scales: one scale for each channel.
        weight_zero_points: one zero point for each channel; floats in embeddings.
        axis: the dimension of the channels.
        is_per_channel: whether the observer had a scale for each channel.
        weight_range: the least and the largest integer.
        shown: the ``extra_repr`` of the float module.
    """

    integers: Tensor
    weight_scales: Tensor
    weight_zero_points: Tensor
    axis: int
    is_per_channel: bool
    weight_range: tuple[int, int]
    shown: str
    place = ""

    def take(self, source: nn.Module, weight: Tensor, observer: Any) -> None:
        """Take the settings of ``source``, and ``weight`` on the qparams of ``observer``."""
        vars(self).update(
            (name, value)
            for name, value in vars(source).items()
            if isinstance(value, SETTINGS) and name not in ("training", "qconfig")
        )
        self.shown = source.extra_repr()
        inner = getattr(observer, "activation_post_process", observer)
        self.is_per_channel = "channel" in str(inner.qscheme)
        self.axis = int(inner.ch_axis) if self.is_per_channel else 0
        self.weight_range = int(inner.quant_min), int(inner.quant_max)
        scale, zero_point = observed(observer)
        is_table = inner.qscheme is torch.per_channel_affine_float_qparams
        dtype = torch.float32 if is_table else torch.int64
        channels = (weight.shape[self.axis],)
        scales = scale.to(weight.device, torch.float32).expand(channels).clone()
        zero_points = zero_point.to(weight.device, dtype).expand(channels).clone()
        values = weight.detach().float()
        if is_table:  # quantized_decomposed rounds before it adds the zero point, and truncates the sum.
            integers = torch.round(values / scales[:, None] + zero_points[:, None])
            integers = integers.clamp(*self.weight_range).to(plain_dtype(observer.dtype))
        else:
            arguments = self.axis, *self.weight_range, plain_dtype(observer.dtype)
            integers = qdq.QUANTIZE_PER_CHANNEL(values, scales, zero_points, *arguments)
        self.register_buffer("integers", integers, persistent=False)
        self.register_buffer("weight_scales", scales, persistent=False)
        self.register_buffer("weight_zero_points", zero_points, persistent=False)

    def float_weight(self) -> Tensor:
        """Return the weight in floats."""
        arguments = self.axis, *self.weight_range, self.integers.dtype
        qparams = self.weight_scales, self.weight_zero_points
        weight: Tensor = qdq.DEQUANTIZE_PER_CHANNEL(self.integers, *qparams, *arguments)
        return weight

    def weight(self) -> Tensor:
        """Return the weight as a quantized tensor, as torch.ao's module does."""
        if self.is_per_channel:
            scales, zero_points = self.weight_scales.double(), self.weight_zero_points
            return quantized_tensors.of_integers_per_channel(self.integers, scales, zero_points, self.axis)
        return quantized_tensors.of_integers(
            self.integers, float(self.weight_scales[0]), int(self.weight_zero_points[0])
        )

    def _get_name(self) -> str:
        return f"Quantized{type(self).__name__}"

    def extra_repr(self) -> str:
        return ", ".join(filter(None, [self.shown, super().extra_repr()]))

    def _present(self) -> dict[str, Tensor]:
        """Return what the state_dict has, by name."""
        names = ("weight", "weight_scale", "weight_zero_point")
        return dict(zip(names, (self.integers, self.weight_scales, self.weight_zero_points), strict=True))

    def numbers_in_state(self) -> dict[str, Numbers]:
        return numbers_of_qparams("weight_scale", "weight_zero_point", self.weight_range)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination.update((f"{prefix}{name}", value.detach()) for name, value in self._present().items())
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        _, _, missing, _, errors = others
        unpack(state_dict, prefix)
        for name, own in self._present().items():
            value = state_dict.pop(f"{prefix}{name}", None)
            if value is None:
                missing.append(f"{prefix}{name}")
            elif own.shape != value.shape:
                shapes = f"{tuple(value.shape)} where the model has {tuple(own.shape)}"
                errors.append(f"{prefix}{name} has the shape {shapes}.")
            else:
                own.copy_(value.detach())
        super()._load_from_state_dict(state_dict, prefix, *others)


def unpack(state_dict: dict[str, Any], prefix: str) -> None:
    """Give the weight and bias of one module, which torch.ao packs, names of their own in ``state_dict``."""
    given: dict[str, Any] = {}
    for packed in ("_packed_params._packed_params", "_packed_params._packed_weight", "_packed_params.dtype"):
        value = state_dict.pop(f"{prefix}{packed}", None)
        if isinstance(value, tuple) and len(value) == 2:
            given |= {"weight": value[0]} | ({} if value[1] is None else {"bias": value[1]})
        elif value is not None and not isinstance(value, torch.dtype):
            given["weight"] = value
    weight: Any = given.get("weight", state_dict.get(f"{prefix}weight"))
    if quantized_tensors.is_quantized(weight):
        if quantized_tensors.is_per_channel(weight) or quantized_tensors.has_float_qparams(weight):
            scale, zero_point = quantized_tensors.channel_qparams(weight)
        else:
            scale, zero_point = (
                torch.full(weight.shape[:1], value) for value in quantized_tensors.qparams_of(weight)
            )
        given |= {
            "weight": quantized_tensors.integers_of(weight),
            "weight_scale": scale,
            "weight_zero_point": zero_point,
        }
    state_dict.update((f"{prefix}{name}", value) for name, value in given.items())


def _is_off_grid(value: Any) -> bool:
    if quantized_tensors.is_quantized(value) or grid_of(value) is not None:
        return False
    # Zeros, the first state of an LSTM, are on every grid.
    return is_compiling() or torch._C._is_tracing() or bool(value.any())


class Weighted(IntegerWeight, OnGrid):
    """Base of the modules with an integer weight whose results are rounded.

    Attributes:
        after: the function that runs before the result is rounded.
    """

    float_bias: Tensor | None
    after: Callable[[Tensor], Tensor] | None = None

    def bias(self) -> Tensor | None:
        """Return the bias, in floats."""
        return self.float_bias

    def forward(self, *args: Any) -> Tensor:
        """Return the result on ``output``."""
        mode = active()
        if mode is not None and _is_off_grid(args[0]):
            mode.unquantized[self.place] = None
        return super().forward(*args)

    def compute(self, *args: Any) -> Tensor:
        y = self.product(args[0])
        for other in args[1:]:
            y = torch.add(y, other)
        return y if self.after is None else self.after(y)

    def product(self, x: Tensor) -> Tensor:
        """Return the product with the weight, plus the bias."""
        raise NotImplementedError

    def numbers_in_state(self) -> dict[str, Numbers]:
        return super().numbers_in_state() | OnGrid.numbers_in_state(self)

    def _present(self) -> dict[str, Tensor]:
        return super()._present() | ({} if self.float_bias is None else {"bias": self.float_bias})


class Linear(Weighted):
    """A linear module with an integer weight."""

    def product(self, x: Tensor) -> Tensor:
        return F.linear(x, self.float_weight(), self.float_bias)


#: Dimensions of the weight -> the functions of a convolution and a transposed one.
CONVOLUTIONS: dict[int, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    3: (F.conv1d, F.conv_transpose1d),
    4: (F.conv2d, F.conv_transpose2d),
    5: (F.conv3d, F.conv_transpose3d),
}


class Convolution(Weighted):
    """A convolution with an integer weight, over any number of dimensions, transposed or not."""

    def product(self, x: Tensor) -> Tensor:
        settings: Any = self
        weight, bias = self.float_weight(), self.float_bias
        convolve, convolve_back = CONVOLUTIONS[weight.dim()]
        padding, dilation, groups = settings.padding, settings.dilation, settings.groups
        if settings.transposed:
            others = settings.stride, padding, settings.output_padding, groups, dilation
            return convolve_back(x, weight, bias, *others)
        if settings.padding_mode != "zeros":
            x = F.pad(x, settings._reversed_padding_repeated_twice, mode=settings.padding_mode)
            padding = 0
        return convolve(x, weight, bias, settings.stride, padding, dilation, groups)


class Embedding(IntegerWeight):
    """An embedding with an integer table; its results are floats."""

    def forward(self, indices: Tensor) -> Tensor:
        """Return the rows of ``indices``."""
        return F.embedding(indices, self.float_weight())


class EmbeddingBag(IntegerWeight):
    """An embedding with an integer table, summed in bags; its results are floats."""

    def forward(
        self, indices: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Return the bags of ``indices``."""
        settings: Any = self
        how = {"mode": settings.mode, "include_last_offset": settings.include_last_offset}
        weight, weights = self.float_weight(), per_sample_weights
        return F.embedding_bag(indices, weight, offsets, per_sample_weights=weights, **how)


class _FloatFunction(OnGrid):
    """Base of the float modules whose results are rounded; beside it stands the class of torch.nn."""

    after: Callable[[Tensor], Tensor] | None = None

    def compute(self, *args: Any) -> Tensor:
        (x,) = args
        y: Tensor = super(OnGrid, self).forward(x)
        return y if self.after is None else self.after(y)


def _named(name: str, *bases: type[nn.Module], after: Any = None) -> type[nn.Module]:
    members: dict[str, Any] = {"__module__": __name__, "__doc__": f"torch.ao's quantized {name}, as q-dq."}
    if after is not None:
        members["after"] = staticmethod(after)
    return type(name, bases, members)


#: The modules of torch.nn that compute in floats between two grids.
FUNCTIONS = (
    *("BatchNorm2d", "BatchNorm3d", "ELU", "GroupNorm", "Hardswish", "InstanceNorm1d", "InstanceNorm2d"),
    *("InstanceNorm3d", "LayerNorm", "LeakyReLU", "PReLU", "Sigmoid", "Softmax"),
)
#: Name in torch.ao.nn.quantized, or its intrinsic package -> class. The classes are attributes of this module
#: too, so that instances can be pickled.
CLASSES: dict[str, type[nn.Module]] = {
    **{cls.__name__: cls for cls in (Quantize, DeQuantize, QFunctional, Linear, Embedding, EmbeddingBag)},
    **{name: _named(name, _FloatFunction, getattr(nn, name)) for name in FUNCTIONS},
    **{f"Conv{rank}d": _named(f"Conv{rank}d", Convolution) for rank in (1, 2, 3)},
    **{f"ConvTranspose{rank}d": _named(f"ConvTranspose{rank}d", Convolution) for rank in (1, 2, 3)},
    **{f"ConvReLU{rank}d": _named(f"ConvReLU{rank}d", Convolution, after=torch.relu) for rank in (1, 2, 3)},
    "ConvAdd2d": _named("ConvAdd2d", Convolution),
    "ConvAddReLU2d": _named("ConvAddReLU2d", Convolution, after=torch.relu),
    "LinearReLU": _named("LinearReLU", Linear, after=torch.relu),
    "LinearLeakyReLU": _named("LinearLeakyReLU", Linear),
    "LinearTanh": _named("LinearTanh", Linear, after=torch.tanh),
}
CLASSES |= {
    f"BNReLU{rank}d": _named(f"BNReLU{rank}d", CLASSES[f"BatchNorm{rank}d"], after=torch.relu)
    for rank in (2, 3)
}
globals().update(CLASSES)
