"""torchao's observers under torch.ao's functions, and the settings of the observers of both."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torchao.quantization.pt2e.fake_quantize as pt2e_fake_quantize
import torchao.quantization.pt2e.observer as pt2e_observer
from torch import nn

from torchq_compat.errors import ConfigError
from torchq_compat.support.argument_checks import shown
from torchq_compat.support.dtypes import plain_dtype
from torchq_compat.support.torch_ao import fake_quantize as legacy_fake_quantize
from torchq_compat.support.torch_ao import observer as legacy_observer

# torchao's observers and fake-quantizes, recognized by torch.ao's functions too.
#
# ``torch.ao.quantization.disable_observer`` and related functions, through ``model.apply`` or called on a
# module, test for torch.ao's base classes and silently ignore torchao's modules; scripts also test for its
# ``FakeQuantize`` or ``HistogramObserver``. The classes here are subclasses of torchao's, registered as
# virtual subclasses of the legacy class of that name: the functions of both libraries act on them, and
# torchao's own classes do not change.


LEGACY_MODULES: dict[str, Any] = {
    pt2e_observer.__name__: legacy_observer,
    pt2e_fake_quantize.__name__: legacy_fake_quantize,
}
#: FixedQParamsFakeQuantize requires that exact type; it has nothing to switch.
REQUIRED_EXACTLY = ("FixedQParamsObserver",)
OBSERVERS = (
    "HistogramObserver",
    "MinMaxObserver",
    "MovingAverageMinMaxObserver",
    "MovingAveragePerChannelMinMaxObserver",
    "NoopObserver",
    "PerChannelMinMaxObserver",
    "PlaceholderObserver",
    "RecordingObserver",
    "ReuseInputObserver",
)
FAKE_QUANTIZES = ("FakeQuantize", "FixedQParamsFakeQuantize", "FusedMovingAvgObsFakeQuantize")


def recognised_by_torch_ao(cls: type[nn.Module]) -> type[nn.Module]:
    """Class decorator: make torch.ao's functions accept this torchao observer or fake-quantize as theirs.

    Legacy: ``isinstance(module, torch.ao.quantization.FakeQuantize)`` of scripts finds it too.
    """
    _legacy_class_of(cls).register(cls)
    return cls


def _legacy_class_of(cls: type[nn.Module]) -> Any:
    """Return torch.ao's class of the name of the nearest torchao class that ``cls`` derives from."""
    for base in cls.__mro__:
        legacy_module = LEGACY_MODULES.get(base.__module__)
        if legacy_module is not None and base.__name__ not in REQUIRED_EXACTLY:
            return getattr(legacy_module, base.__name__)
    raise TypeError(f"{cls.__name__} is no observer or fake-quantize of torchao")


def _subclass(base: type[nn.Module]) -> type[nn.Module]:
    return recognised_by_torch_ao(
        type(base.__name__, (base,), {"__module__": __name__, "__doc__": base.__doc__})
    )


#: Name -> class. The classes are attributes of this module too, so that instances can be pickled.
SUBCLASSES: dict[str, type[nn.Module]] = {
    **{name: _subclass(getattr(pt2e_observer, name)) for name in OBSERVERS},
    **{name: _subclass(getattr(pt2e_fake_quantize, name)) for name in FAKE_QUANTIZES},
}
globals().update(SUBCLASSES)


# Read the settings of an observer: those of the quantized tensor, and those that a BackendConfig may
# constrain.


LEGACY_BASES = (legacy_observer.ObserverBase, legacy_fake_quantize.FakeQuantizeBase)
PT2E_BASES = (pt2e_observer.ObserverBase, pt2e_fake_quantize.FakeQuantizeBase)
FIXED_QPARAMS = (legacy_observer.FixedQParamsObserver, pt2e_observer.FixedQParamsObserver)


def is_of_torch_ao(module: nn.Module) -> bool:
    """Return whether ``module`` is an observer or fake-quantize of torch.ao, which torchao does not know."""
    # Some of our classes are torchao's and registered as torch.ao's.
    return isinstance(module, LEGACY_BASES) and not isinstance(module, PT2E_BASES)


def class_of(constructor: Any) -> Any:
    """Return the class of ``Class``, of ``Class.with_args(...)`` or of a partial of it."""
    while hasattr(constructor, "p") or isinstance(constructor, partial):
        constructor = getattr(constructor, "p", constructor).func
    return constructor


def has_fixed_qparams(observer: nn.Module) -> bool:
    """Return whether an observer, or the observer inside a fake-quantize, has qparams that were given."""
    return isinstance(getattr(observer, "activation_post_process", observer), FIXED_QPARAMS)


PER_CHANNEL = (
    torch.per_channel_affine,
    torch.per_channel_symmetric,
    torch.per_channel_affine_float_qparams,
)


@dataclass(frozen=True)
class ObserverLimits:
    """The settings of the user's own observer that a BackendConfig may constrain; None if the observer lacks
    the setting."""

    quant_min: int | None
    quant_max: int | None
    eps: float | None
    fixed_scale: float | None
    fixed_zero_point: int | None

    @classmethod
    def of(cls, module: nn.Module) -> ObserverLimits:
        """Read the limits of an observer, or of the observer inside a fake-quantize."""
        observer: Any = getattr(module, "activation_post_process", module)
        is_fixed = isinstance(observer, FIXED_QPARAMS)
        eps = getattr(observer, "eps", None)
        return cls(
            quant_min=getattr(observer, "quant_min", None),
            quant_max=getattr(observer, "quant_max", None),
            eps=None if eps is None else float(eps),
            fixed_scale=float(observer.scale) if is_fixed else None,
            fixed_zero_point=int(observer.zero_point) if is_fixed else None,
        )


@dataclass(frozen=True)
class ObserverSettings:
    """The settings of an observer for the quantized tensor: plain dtype, range, scheme, axis.

    Attributes:
        declared_dtype: the dtype that the user gave, such as quint4x2 if ``dtype`` is uint8.
    """

    dtype: torch.dtype
    declared_dtype: torch.dtype
    qscheme: torch.qscheme
    quant_min: int | None
    quant_max: int | None
    ch_axis: int | None
    is_dynamic: bool
    is_fake_quantize: bool
    has_fixed_qparams: bool
    reuses_input: bool
    observer_type: type[nn.Module]
    limits: ObserverLimits


def read_settings(module: nn.Module, legacy: nn.Module, setting: str = "qconfig") -> ObserverSettings:
    """Return the settings of the torchao observer or fake-quantize translated from ``legacy``.

    Raises:
        ConfigError: the channel axis is no valid axis; names ``setting``.
    """
    source: nn.Module = getattr(module, "activation_post_process", module)
    observed_by: nn.Module = getattr(source, "legacy", source)
    ch_axis = getattr(source, "ch_axis", None)
    qscheme = getattr(source, "qscheme", None) or torch.per_tensor_affine
    if qscheme in PER_CHANNEL and not (isinstance(ch_axis, int) and ch_axis >= 0):
        raise ConfigError.of("TQ910.axis_type", setting=setting, axis=shown(ch_axis))
    return ObserverSettings(
        dtype=plain_dtype(module.dtype),  # type: ignore[arg-type]
        declared_dtype=legacy.dtype,  # type: ignore[arg-type]
        qscheme=qscheme,
        quant_min=getattr(source, "quant_min", None),
        quant_max=getattr(source, "quant_max", None),
        ch_axis=int(ch_axis) if qscheme in PER_CHANNEL and ch_axis is not None else None,
        is_dynamic=bool(getattr(module, "is_dynamic", False)),
        is_fake_quantize=isinstance(module, pt2e_fake_quantize.FakeQuantizeBase),
        has_fixed_qparams=isinstance(source, pt2e_observer.FixedQParamsObserver),
        reuses_input=isinstance(source, pt2e_observer.ReuseInputObserver),
        observer_type=type(observed_by),
        limits=ObserverLimits.of(legacy),
    )


def take_settings(observer: Any, source: Any) -> None:
    """Give ``observer`` the settings of ``source`` that torchao's convert reads, beside its dtype."""
    for name in ("qscheme", "quant_min", "quant_max"):
        setattr(observer, name, getattr(source, name))
    if getattr(source, "ch_axis", None) is not None:
        observer.ch_axis = source.ch_axis
