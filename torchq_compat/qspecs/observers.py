"""Translate a torch.ao observer or fake-quantize to the torchao class that PT2E recognizes.

With legacy objects in a torchao QuantizationSpec, prepare and calibration raise no error but yield no q-dq at
all, because torchao tests for its own base classes. A class that torchao has under the same name is rebuilt
from the attributes of a legacy instance; any other class, such as a user's own, is wrapped in an adapter.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torchao.quantization.pt2e.fake_quantize as pt2e_fake_quantize
import torchao.quantization.pt2e.observer as pt2e_observer
from torch import Tensor, nn

from torchq_compat.errors import ConfigError
from torchq_compat.qspecs.fast_observers import FastHistogramObserver, FastMinMaxObserver
from torchq_compat.qspecs.float_qparams import FloatQParamsFakeQuantize
from torchq_compat.qspecs.fused_fake_quantize import FusedFakeQuantize
from torchq_compat.qspecs.observer_settings import FIXED_QPARAMS, read_settings
from torchq_compat.qspecs.saturation import SaturationCountingObserver
from torchq_compat.qspecs.torch_ao_subclasses import SUBCLASSES, recognised_by_torch_ao
from torchq_compat.support.dtypes import PACKED_DTYPES, dtype_range, is_integer, plain_dtype
from torchq_compat.support.torch_ao import fake_quantize as legacy_fake_quantize
from torchq_compat.support.torch_ao import observer as legacy_observer

__all__ = [
    "LegacyFakeQuantizeAdapter",
    "LegacyObserverAdapter",
    "ObserverConstructor",
    "adapted",
    "fixed_qparams_constructor",
    "is_of_torch_ao",
    "translate_constructor",
]

LegacyConstructor = Callable[[], nn.Module]
HOMES = (legacy_observer, legacy_fake_quantize, pt2e_observer, pt2e_fake_quantize)
PT2E_BASES = (pt2e_observer.ObserverBase, pt2e_fake_quantize.FakeQuantizeBase)
LEGACY_BASES = (legacy_observer.ObserverBase, legacy_fake_quantize.FakeQuantizeBase)
# Constructor arguments that are stored in an attribute of another name.
ATTRIBUTE_OF_ARGUMENT = {"custom_op_name": "custom_op"}

#: Classes that are replaced by this package's versions, which report more or are faster.
REPLACED: dict[str, Callable[..., nn.Module]] = {
    "FusedMovingAvgObsFakeQuantize": FusedFakeQuantize,
    "HistogramObserver": FastHistogramObserver,
    "MinMaxObserver": FastMinMaxObserver,
    "MovingAverageMinMaxObserver": SaturationCountingObserver,
}
#: The warnings that were already passed on.
_TOLD: set[tuple[type[Warning], str]] = set()


class ObserverConstructor:
    """Makes torchao observers that behave like those of one legacy constructor.

    torchao's prepare calls ``constructor.with_args(**spec)()`` and reads ``constructor.__name__``. The legacy
    constructor already has all settings that the spec repeats, so ``with_args`` changes nothing.

    Args:
        legacy: a torch.ao or torchao observer or fake-quantize class, or ``Class.with_args(...)``.
        setting: the name of the setting it came from, for error messages.

    Raises:
        ConfigError: ``legacy`` is no such constructor.
    """

    def __init__(self, legacy: LegacyConstructor, setting: str = "qconfig") -> None:
        self.legacy = legacy
        self.setting = setting
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            legacy_made = self._make_legacy()
        _warn_once(caught)
        self.settings = read_settings(self(), legacy_made, setting)
        self.__name__ = "PerChannelObserver" if self.settings.ch_axis is not None else "Observer"

    def with_args(self, **_spec: Any) -> ObserverConstructor:
        return self

    def __call__(self) -> nn.Module:
        with warnings.catch_warnings():
            # Both libraries warn about reduce_range; the user's script chose it, not this package.
            warnings.simplefilter("ignore")
            return _translate(self._make_legacy())

    def _make_legacy(self) -> nn.Module:
        if not callable(self.legacy) or isinstance(self.legacy, nn.Module):
            raise _not_a_constructor(self.setting, self.legacy)
        try:
            made = self.legacy()
        except TypeError as cause:
            raise _not_a_constructor(self.setting, self.legacy) from cause
        except Exception as cause:
            raise _observer_cannot_be_made(self.setting, cause) from cause
        if not isinstance(made, (*PT2E_BASES, *LEGACY_BASES)):
            raise _not_a_constructor(self.setting, self.legacy)
        return made


def _warn_once(caught: Iterable[warnings.WarningMessage]) -> None:
    """Pass on a library's warnings about an observer, each only once: every rule makes observers anew."""
    for each in caught:
        told = (each.category, str(each.message))
        if told not in _TOLD:
            _TOLD.add(told)
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)


def translate_constructor(legacy: LegacyConstructor, setting: str = "qconfig") -> ObserverConstructor:
    """Return ``legacy`` as a constructor of torchao observers, unchanged if it already is one."""
    if isinstance(legacy, ObserverConstructor):
        return legacy
    return ObserverConstructor(legacy, setting)


def fixed_qparams_constructor(
    scale: float, zero_point: int, dtype: torch.dtype, *, fake_quantize: bool
) -> ObserverConstructor:
    """Return a constructor of observers that always report ``scale`` and ``zero_point``, over the whole range
    of ``dtype``."""
    quant_min, quant_max = dtype_range(dtype)
    observer = pt2e_observer.FixedQParamsObserver.with_args(
        scale=scale, zero_point=zero_point, dtype=plain_dtype(dtype), quant_min=quant_min, quant_max=quant_max
    )
    if fake_quantize:
        return ObserverConstructor(pt2e_fake_quantize.FixedQParamsFakeQuantize.with_args(observer=observer))
    return ObserverConstructor(observer)


def _translate(made: nn.Module) -> nn.Module:
    mirror = _mirror_class(type(made))
    if mirror is None:
        return adapted(made)
    inner = getattr(made, "activation_post_process", None)
    if inner is not None:
        if getattr(inner, "qscheme", None) is torch.per_channel_affine_float_qparams:
            mirror = FloatQParamsFakeQuantize
        return mirror(observer=lambda **_: _translate(inner))
    return mirror(**_arguments_from_attributes(mirror, made))


def is_of_torch_ao(module: nn.Module) -> bool:
    """Return whether ``module`` is an observer or fake-quantize of torch.ao, which torchao does not know."""
    return isinstance(module, LEGACY_BASES) and not isinstance(module, PT2E_BASES)


def adapted(made: nn.Module) -> nn.Module:
    """Return an observer for torchao: unchanged if derived from its classes, else as part of an adapter."""
    if isinstance(made, PT2E_BASES):
        torchao_own: nn.Module = made
        return torchao_own
    if isinstance(made, legacy_fake_quantize.FakeQuantizeBase):
        return LegacyFakeQuantizeAdapter(made)
    return LegacyObserverAdapter(made)


def _mirror_class(cls: type[nn.Module]) -> Callable[..., nn.Module] | None:
    """Return our class for one of torch.ao or torchao, else None; by identity: a user may reuse a name."""
    name = cls.__name__
    if all(getattr(home, name, None) is not cls for home in HOMES):
        return None
    ours = REPLACED.get(name) or SUBCLASSES.get(name)
    mirror: Callable[..., nn.Module] | None = ours or getattr(pt2e_observer, name, None)
    return mirror


def _arguments_from_attributes(mirror: Callable[..., nn.Module], made: nn.Module) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for name in inspect.signature(_torchao_class(mirror)).parameters:
        attribute = ATTRIBUTE_OF_ARGUMENT.get(name, name)
        if hasattr(made, attribute):
            arguments[name] = _plain_value(getattr(made, attribute))
    if getattr(made, "has_customized_qrange", False):
        arguments["reduce_range"] = False  # A given range is stored already reduced.
    elif hasattr(made, "has_customized_qrange") and made.dtype not in PACKED_DTYPES:
        del arguments["quant_min"], arguments["quant_max"]
    if isinstance(made, FIXED_QPARAMS):
        arguments["quant_min"], arguments["quant_max"] = _fixed_qparams_range(made)
    return arguments


def _torchao_class(mirror: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Return the class whose constructor names the arguments; our subclasses pass them on."""
    is_torchao_own = getattr(pt2e_observer, mirror.__name__, None) is mirror
    base: Callable[..., nn.Module] = mirror if is_torchao_own else mirror.__bases__[0]  # type: ignore[attr-defined]
    return base


def _plain_value(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    return plain_dtype(value) if isinstance(value, torch.dtype) else value


def _fixed_qparams_range(made: Any) -> tuple[int, int]:
    """Return the range to clamp to.

    FixedQParamsObserver stores 0..255 for every dtype if the user gave no range. FX's quantize op ignores the
    stored range; PT2E's op clamps to it, which turns a 32-bit part into zeros. So the range of the dtype is
    used instead.
    """
    if (made.quant_min, made.quant_max) == (0, 255):
        return dtype_range(made.dtype)
    return made.quant_min, made.quant_max


def _copy_settings(adapter: nn.Module, legacy: nn.Module) -> None:
    """Copy the settings that torchao's convert reads to the adapter itself."""
    dtype = plain_dtype(legacy.dtype)  # type: ignore[arg-type]
    low, high = dtype_range(dtype) if is_integer(dtype) else (None, None)
    source = getattr(legacy, "activation_post_process", legacy)

    def first_given(name: str, default: Any) -> Any:
        for owner in (legacy, source):
            if getattr(owner, name, None) is not None:
                return getattr(owner, name)
        return default

    adapter.dtype = dtype  # type: ignore[assignment]
    adapter.qscheme = first_given("qscheme", torch.per_tensor_affine)
    adapter.quant_min = first_given("quant_min", low)
    adapter.quant_max = first_given("quant_max", high)
    adapter.is_dynamic = bool(getattr(legacy, "is_dynamic", False))  # type: ignore[assignment]
    if first_given("ch_axis", None) is not None:
        adapter.ch_axis = first_given("ch_axis", None)


@recognised_by_torch_ao
class LegacyObserverAdapter(pt2e_observer.ObserverBase):  # type: ignore[misc]
    """A user's own torch.ao observer as a torchao observer; the user's object does the observing."""

    def __init__(self, legacy: nn.Module) -> None:
        super().__init__(dtype=plain_dtype(legacy.dtype))  # type: ignore[arg-type]
        self.legacy = legacy
        _copy_settings(self, legacy)

    def __getattr__(self, name: str) -> Any:
        return _of_legacy(self, name, super().__getattr__)

    def forward(self, x: Tensor) -> Tensor:
        self.legacy(x)
        return x

    def calculate_qparams(self, **_: Any) -> tuple[Tensor, Tensor]:
        scale, zero_point = self.legacy.calculate_qparams()  # type: ignore[operator]
        return scale, zero_point


@recognised_by_torch_ao
class LegacyFakeQuantizeAdapter(pt2e_fake_quantize.FakeQuantizeBase):  # type: ignore[misc]
    """A user's own torch.ao fake-quantize, or torch.ao's private learnable one, as a torchao class."""

    def __init__(self, legacy: nn.Module) -> None:
        super().__init__()
        self.legacy = legacy
        _copy_settings(self, legacy)

    def __getattr__(self, name: str) -> Any:
        return _of_legacy(self, name, super().__getattr__)

    def forward(self, x: Tensor) -> Tensor:
        fake_quantized: Tensor = self.legacy(x)
        return fake_quantized

    def calculate_qparams(self, **_: Any) -> tuple[Tensor, Tensor]:
        scale, zero_point = self.legacy.calculate_qparams()  # type: ignore[operator]
        return scale, zero_point

    @property
    def learns_qparams(self) -> bool:
        """Whether torch.ao's learnable fake-quantize trains its qparams instead of observing them."""
        learning = getattr(self.legacy, "learning_enabled", None)
        return isinstance(learning, Tensor) and bool(learning)

    def enable_fake_quant(self, enabled: bool = True) -> None:
        self.legacy.enable_fake_quant(enabled)  # type: ignore[operator]

    def enable_observer(self, enabled: bool = True) -> None:
        self.legacy.enable_observer(enabled)  # type: ignore[operator]


def _of_legacy(adapter: nn.Module, name: str, own: Callable[[str], Any]) -> Any:
    """Return an attribute of the user's object: ``scale`` of a learnable fake-quantize, or ``min_val``."""
    try:
        return own(name)
    except AttributeError:
        legacy = vars(adapter).get("_modules", {}).get("legacy")
        # activation_post_process is read to find out whether the adapter has an observer of its own.
        is_private = name.startswith("_") or name == "activation_post_process"
        if legacy is None or is_private or not hasattr(legacy, name):
            raise
        return getattr(legacy, name)


def _not_a_constructor(setting: str, found: object) -> ConfigError:
    return ConfigError(
        f"{setting} is not an observer or fake-quantize constructor: {found!r}.",
        hint="pass a class or Class.with_args(...), not an instance or its result.",
    )


def _observer_cannot_be_made(setting: str, cause: BaseException) -> ConfigError:
    first_line = str(cause).strip().split("\n", 1)[0]
    return ConfigError(
        f"{setting} cannot make its observer: {type(cause).__name__}: {first_line}",
        hint="call it once on its own, as in qconfig.activation(), and see which argument it refuses.",
    )
