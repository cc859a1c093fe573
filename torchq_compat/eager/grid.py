"""The quantized values of a converted eager model: floats whose qparams are known while the model runs.

A quantized tensor of torch.ao carried its qparams from module to module, through the user's own code. Here
the values between modules are plain floats that lie on a grid, ``(q - zero_point) * scale``, and a
``FollowGrid`` knows the grid of each. It sees every torch function that the user's code calls and does what
the kernel for quantized tensors did: values are moved, or rounded to the grid of the input. In an export it
does the same, so that the captured graph is q-dq.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from torchq_compat.capture.opaque_calls import OpaqueModule
from torchq_compat.ops import those
from torchq_compat.read.qparams import PerTensorQParams
from torchq_compat.support import quantized_tensors
from torchq_compat.support.dtypes import LEGACY_DTYPES
from torchq_compat.support.process_state import held, is_exporting, own_attribute
from torchq_compat.support.upstream import pytree

#: Functions whose results are rounded to the qparams of their input, in place too.
ROUNDED = frozenset(
    """
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d avg_pool1d avg_pool2d avg_pool3d clamp
    clamp_max clamp_min clip fill gelu hardtanh interpolate leaky_relu masked_fill mean pad relu6 std
    threshold upsample upsample_bilinear zero
    """.split()  # noqa: SIM905 - one to a line would be a page
)
#: Functions whose results have values of their input, or zeros, so that nothing has to be rounded: the aten
#: operators that move values, and what else torch and its tensors have by other names.
MOVES = {operator._schema.name.partition("::")[2] for operator in those("moves")} - ROUNDED | set(
    """
    __getitem__ adaptive_max_pool1d adaptive_max_pool2d alpha_dropout amax amin as_strided cpu cuda dropout1d
    dropout2d dropout3d expand_as feature_alpha_dropout gather masked_select max max_pool1d_with_indices
    max_pool2d_with_indices max_pool3d_with_indices median min native_channel_shuffle requires_grad
    reshape_as roll sort take to topk type_as upsample_nearest view_as
    """.split()  # noqa: SIM905 - one to a line would be a page
)
#: Those that kernels compute of the integers: sums are exact, halves are common, and rounded to even.
AVERAGES = frozenset(f"{kind}_pool{rank}d" for kind in ("avg", "adaptive_avg") for rank in (1, 2, 3))
#: Functions whose results have qparams of their own: scale, and zero point above the least integer.
FIXED = {"hardsigmoid": (1 / 256, 0), "sigmoid": (1 / 256, 0), "tanh": (2 / 256, 128)}
#: Functions that join tensors, whose results have the qparams of the first.
JOINS = frozenset(["cat", "concat", "concatenate", "hstack", "stack", "vstack"])

#: Functions that make quantized tensors.
QUANTIZE_CALLS = ("quantize_per_tensor",)
#: What a quantized tensor answered.
ANSWERS: dict[str, Callable[[Tensor, PerTensorQParams], Any]] = {
    "dequantize": lambda value, grid: value.detach(),
    "int_repr": lambda value, grid: grid.quantize(value),
    "q_scale": lambda value, grid: grid.scale,
    "q_zero_point": lambda value, grid: grid.zero_point,
    "qscheme": lambda value, grid: torch.per_tensor_affine,
}

#: Whether values are rounded as in the exported graph.
_AS_GRAPH: ContextVar[bool] = ContextVar("torchq_compat_as_graph", default=False)
_ACTIVE: ContextVar[FollowGrid | None] = ContextVar("torchq_compat_grid", default=None)


class FollowGrid(TorchFunctionMode):
    """Knows the qparams of the values of a converted eager model, during one call.

    Attributes:
        left: the names of functions that computed floats from values on a grid.
        unquantized: the paths of quantized modules that were given values on no grid.
        by_hand: the names of kernels for quantized tensors that the user's code calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self._grids: Any = WeakIdKeyDictionary()
        self.is_paused = False
        self.left: dict[str, None] = {}
        self.unquantized: dict[str, None] = {}
        self.by_hand: dict[str, None] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call ``func``; round its results, or hand the qparams of its inputs on."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").partition(".")[0]
        if self.is_paused or (not self._grids and name not in QUANTIZE_CALLS):
            return func(*args, **kwargs)
        before = next(filter(None, map(self.of, pytree.tree_leaves((args, kwargs)))), None)
        if before is not None and name in ANSWERS:
            return ANSWERS[name](args[0], before)
        if getattr(func, "_qualified_op_name", "").startswith("quantized::"):
            args, kwargs = pytree.tree_map(self._as_quantized_tensor, (args, kwargs))
            self.by_hand[name] = None
        if before is not None and name in JOINS:
            args = tuple(pytree.tree_map(lambda leaf: self._joined(leaf, before), arg) for arg in args)
        if before is not None and name in AVERAGES and not _is_as_graph():
            args, kwargs = pytree.tree_map(self._in_steps, (args, kwargs))
            zero_point = 0 if torch.backends.quantized.engine == "qnnpack" else before.zero_point
            return put_on(_on_steps(func(*args, **kwargs), before, zero_point), before)
        result = func(*args, **kwargs)
        if quantized_tensors.is_quantized(result):
            grid = PerTensorQParams.of_tensor(result)
            return result if grid is None else self.know(quantized_tensors.as_float(result), grid)
        if before is None:
            return result
        for value in pytree.tree_leaves(result):
            if isinstance(value, Tensor) and value.is_floating_point():
                result = self._with_grid(name, result, value, before)
        return result

    def of(self, value: Any) -> PerTensorQParams | None:
        """Return the qparams of ``value``; None if it is not known to lie on any."""
        grid: PerTensorQParams | None = self._grids.get(value) if isinstance(value, Tensor) else None
        return grid

    def know(self, value: Tensor, qparams: PerTensorQParams) -> Tensor:
        """Return ``value``, which lies on ``qparams``."""
        self._grids[value] = qparams
        return value

    def _in_steps(self, value: Any) -> Any:
        grid = self.of(value)
        return value if grid is None else torch.round(value / grid.scale)

    def _as_quantized_tensor(self, value: Any) -> Any:
        grid = self.of(value)
        if grid is None:
            return value
        return quantized_tensors.quantize(value, grid.scale, grid.zero_point, LEGACY_DTYPES[grid.dtype])

    def _joined(self, value: Any, qparams: PerTensorQParams) -> Any:
        if not isinstance(value, Tensor) or self.of(value) in (None, qparams):
            return value
        return qparams.dequantize(qparams.quantize(value), value.dtype)

    def _with_grid(self, name: str, result: Any, value: Tensor, before: PerTensorQParams) -> Any:
        """Return ``result``, whose float tensor ``value`` has qparams if the kernel had given it any."""
        function = name if name.endswith("__") else name.removesuffix("_")
        if function in MOVES or function in JOINS or function in ("__get__", "__set__"):
            self.know(value, before)
            return result
        grid = _fixed(function, before) if function in FIXED else before
        if function not in FIXED and function not in ROUNDED:
            self.left[name] = None
            return result
        rounded = put_on(as_quantize_per_tensor(value, grid), grid)
        if name.endswith("_") and value is result:
            value.copy_(rounded)
            return self.know(value, grid)
        return pytree.tree_map(lambda leaf: rounded if leaf is value else leaf, result)


def _fixed(name: str, before: PerTensorQParams) -> PerTensorQParams:
    scale, zero_point = FIXED[name]
    return replace(before, scale=scale, zero_point=before.quant_min + zero_point)


def active() -> FollowGrid | None:
    """Return what follows the values of the call that runs, or None."""
    return _ACTIVE.get()


@contextmanager
def following() -> Iterator[FollowGrid]:
    """Follow the values of a converted model; inside another such call, go on with that."""
    if (running := _ACTIVE.get()) is not None:
        yield running
        return
    with FollowGrid() as mode, held(_ACTIVE, mode):
        yield mode


def paused() -> AbstractContextManager[None]:
    """Let torch functions be, inside a module whose results get their qparams from it."""
    mode = _ACTIVE.get()
    return nullcontext() if mode is None else own_attribute(mode, "is_paused", True)


def rounding_as_graph() -> AbstractContextManager[None]:
    """Round values as the exported graph does, which is compared with the model."""
    return held(_AS_GRAPH, True)


def as_quantize_per_tensor(value: Tensor, qparams: PerTensorQParams) -> Tensor:
    """Return ``value`` rounded as ``torch.quantize_per_tensor`` does.

    It adds the zero point before it rounds, which halfway between two steps gives the other one. An exported
    graph keeps to the operator of q-dq.
    """
    if _is_as_graph() or value.dtype is not torch.float32:
        return value
    return _on_steps(value * (1.0 / qparams.scale), qparams, qparams.zero_point)


def _is_as_graph() -> bool:
    return is_exporting() or _AS_GRAPH.get()


def _on_steps(value: Tensor, qparams: PerTensorQParams, zero: int) -> Tensor:
    """Round ``value``, in steps above the zero point, to ``qparams``; ``zero`` is added before rounding."""
    steps = torch.round(value + zero) + (qparams.zero_point - zero)
    return (steps.clamp(qparams.quant_min, qparams.quant_max) - qparams.zero_point) * qparams.scale


def put_on(value: Tensor, qparams: PerTensorQParams) -> Tensor:
    """Round ``value`` to ``qparams``."""
    rounded = qparams.dequantize(qparams.quantize(value), value.dtype)
    mode = active()
    return rounded if mode is None else mode.know(rounded, qparams)


def grid_of(value: Tensor) -> PerTensorQParams | None:
    """Return the qparams that ``value`` is known to lie on."""
    mode = active()
    return None if mode is None else mode.of(value)


# Custom modules compute their own results, whose grids they know.


def keep_custom_results(converted: OpaqueModule) -> None:
    """Let ``converted`` hand its qparams on with its results."""
    converted.register_forward_pre_hook(_enter, prepend=True)
    converted.register_forward_hook(_leave, always_call=True)


def _enter(module: nn.Module, _inputs: Any) -> None:
    if (mode := active()) is not None:
        mode.is_paused = True


def _leave(module: Any, _inputs: Any, result: Any) -> None:
    mode = active()
    if mode is None:
        return
    mode.is_paused = False
    values = [value for value in pytree.tree_leaves(result) if isinstance(value, Tensor)]
    for value, qparams in zip(values, module.opaque_output_qparams(values), strict=False):
        if qparams is not None:
            mode.know(value, qparams)
