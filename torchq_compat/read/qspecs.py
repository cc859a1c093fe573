"""Translate QConfigs to torchao's QuantizationSpecs, and check that they can mean what they say."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
import torchao.quantization.pt2e.fake_quantize as pt2e_fake_quantize
import torchao.quantization.pt2e.observer as pt2e_observer
from torch import Tensor, nn
from torchao.quantization.pt2e.quantizer import QuantizationSpec

from torchq_compat.errors import ConfigError
from torchq_compat.read.observers import ObserverConstructor, WeightConstructor, translate_constructor
from torchq_compat.read.torch_ao_classes import ObserverSettings, class_of, is_of_torch_ao
from torchq_compat.support.dtypes import PACKED_DTYPES, dtype_name, dtype_range, is_integer
from torchq_compat.support.torch_ao import NoopObserver, PlaceholderObserver, QConfig, QuantType
from torchq_compat.support.torch_ao import fake_quantize as legacy_fake_quantize

# Observers whose settings contradict each other: a range beyond the dtype, fixed qparams outside the range.
#
# FX makes the observers, calibrates, and fails in the converted model (``zero_point -128 is below lower
# bound``) or clamps to the dtype. PT2E clamps to the range first and then wraps around in the dtype, which
# is noise.


def check_settings(settings: ObserverSettings, setting: str) -> None:
    """Refuse ``settings`` that no tensor can be quantized with.

    Raises:
        ConfigError: names ``setting``, the source of ``settings``, and the two that contradict each other.
    """
    if not is_integer(settings.dtype):
        return
    dtype = dtype_name(settings.declared_dtype)
    low, high = dtype_range(settings.dtype)
    if settings.declared_dtype in PACKED_DTYPES:  # PT2E stores one of their values to a byte.
        low, high = 0, 15 if "4x2" in str(settings.declared_dtype) else 3
    given_low = low if settings.quant_min is None else settings.quant_min
    given_high = high if settings.quant_max is None else settings.quant_max
    given = given_low, given_high
    if not low <= given_low < given_high <= high:
        held = low, high
        raise ConfigError.of("TQ910.range_beyond_dtype", setting=setting, given=given, dtype=dtype, held=held)
    scale, zero_point = settings.limits.fixed_scale, settings.limits.fixed_zero_point
    if scale is not None and not (math.isfinite(scale) and scale > 0):
        raise ConfigError.of("TQ910.fixed_scale", setting=setting, scale=scale)
    if zero_point is not None and not given_low <= zero_point <= given_high:
        raise ConfigError.of("TQ910.fixed_zero_point", setting=setting, zero_point=zero_point, held=given)


def check_axis(settings: ObserverSettings, dimensions: int, place: str) -> None:
    """Refuse a ``ch_axis`` that a tensor of ``dimensions`` dimensions does not have.

    Raises:
        ConfigError: names ``place``, the op and the observed tensor.
    """
    axis = settings.ch_axis
    if axis is not None and not -dimensions <= axis < dimensions:
        raise ConfigError.of("TQ910.axis", place=place, axis=axis, dimensions=dimensions)


# Translate a QConfig to the torchao QuantizationSpecs of one op: activation and weight.
#
# A legacy QConfig has one activation constructor for inputs and outputs. Its meaning depends on its dtype:
# a float placeholder quantizes nothing, ``is_dynamic`` quantizes only inputs, and any other activation is
# static.


def make_spec(constructor: ObserverConstructor) -> QuantizationSpec:
    """Return the spec whose observers ``constructor`` makes.

    Raises:
        ConfigError: the settings of ``constructor`` contradict each other.
    """
    settings = constructor.settings
    check_settings(settings, constructor.setting)
    names = ("dtype", "quant_min", "quant_max", "qscheme", "ch_axis", "is_dynamic")
    given = {name: getattr(settings, name) for name in names}
    return QuantizationSpec(observer_or_fake_quant_ctr=constructor, **given)


@dataclass(frozen=True)
class OpSpecs:
    """The specs of one QConfig; a spec is None if the QConfig does not quantize it."""

    qconfig: QConfig

    @cached_property
    def activation_constructor(self) -> ObserverConstructor:
        return translate_constructor(self.qconfig.activation, "qconfig.activation")

    @cached_property
    def weight_constructor(self) -> ObserverConstructor:
        return translate_constructor(self.qconfig.weight, "qconfig.weight")

    @cached_property
    def activation(self) -> QuantizationSpec | None:
        """The spec of inputs, and of outputs unless the QConfig is dynamic."""
        constructor = self.activation_constructor
        return make_spec(constructor) if _quantizes(constructor.settings.dtype) else None

    @cached_property
    def weight(self) -> QuantizationSpec | None:
        constructor = self.weight_constructor
        if not _quantizes(constructor.settings.dtype):
            return None
        if constructor.settings.is_fake_quantize:
            return make_spec(constructor)
        return make_spec(WeightConstructor(constructor))

    @cached_property
    def computed_weight(self) -> QuantizationSpec:
        """The spec of a weight that the model computes: observed in every call, not once at convert."""
        return make_spec(self.weight_constructor)

    @property
    def activation_dtype(self) -> torch.dtype:
        return self.activation_constructor.settings.dtype

    @property
    def weight_dtype(self) -> torch.dtype:
        return self.weight_constructor.settings.dtype

    @property
    def declared_weight_dtype(self) -> torch.dtype:
        """The weight dtype that the QConfig gives: to a backend, quint4x2 differs from uint8."""
        return self.weight_constructor.settings.declared_dtype

    @property
    def reuses_input(self) -> bool:
        return self.activation_constructor.settings.reuses_input

    @property
    def is_dynamic(self) -> bool:
        return self.activation_constructor.settings.is_dynamic

    @property
    def quant_type(self) -> QuantType:
        """The quantization type whose mapping of a custom config applies."""
        if self.is_static:
            return QuantType.STATIC
        return QuantType.DYNAMIC if self.is_dynamic else QuantType.WEIGHT_ONLY

    @property
    def is_static(self) -> bool:
        """Whether activations are quantized with qparams known after calibration."""
        return is_integer(self.activation_dtype) and not self.is_dynamic


def _quantizes(dtype: torch.dtype) -> bool:
    return is_integer(dtype) or dtype is torch.float16


# Whether QConfigs suit the function they are given to: fake-quantizes train, observers calibrate.


FAKE_QUANTIZES = (legacy_fake_quantize.FakeQuantizeBase, pt2e_fake_quantize.FakeQuantizeBase)
WITHOUT_RANGE = (NoopObserver, PlaceholderObserver)
#: Fake-quantizes with given qparams: they are the same in calibration and in training.
FIXED = (legacy_fake_quantize.FixedQParamsFakeQuantize, pt2e_fake_quantize.FixedQParamsFakeQuantize)


def misfit(qconfigs: Iterable[QConfig | None], *, is_qat: bool) -> str:
    """Return a warning about ``qconfigs`` in this mode; empty if they suit it."""
    pairs = [
        [
            result
            for result in map(class_of, (qconfig.activation, qconfig.weight))
            if isinstance(result, type) and not issubclass(result, WITHOUT_RANGE)
        ]
        for qconfig in qconfigs
        if isinstance(qconfig, QConfig)
    ]
    classes = [built for pair in pairs for built in pair]
    fakes = [product for product in classes if issubclass(product, FAKE_QUANTIZES)]
    if is_qat and classes and not fakes:
        return (
            "prepare_qat_fx: the qconfig_mapping has observers and no fake-quantize, so training does not "
            "see the rounding."
        )
    learnt = {cls for cls in fakes if not issubclass(cls, FIXED)}
    # A QConfig with a single fake-quantize is not for training: torch.ao has such QConfigs for calibration.
    if not is_qat and any(len(pair) == 2 and learnt.issuperset(pair) for pair in pairs):
        return (
            "prepare_fx: the qconfig_mapping has fake-quantizes, which are for training: in calibration "
            "each layer gets inputs that the layers before it have rounded, and ranges are moving averages."
        )
    return ""


# A user's QuantizationSpec with an observer of torch.ao, as the old tutorials import them.
#
# torchao accepts such an observer, calibrates it, and quantizes nothing: its convert looks for its own base
# classes. With ``.with_args``, its prepare fails, because it reads ``__name__`` of a value that is no class.


CONSTRUCTOR = "observer_or_fake_quant_ctr"


class SpecObserverConstructor(ObserverConstructor):
    """Makes the torchao observers of one spec; equal for equal specs, so that torchao shares their observers.

    Args:
        spec: a spec whose constructor is torch.ao's, or has a class that torchao cannot see.
        setting: the name of the setting, for error messages.

    Raises:
        ConfigError: the constructor makes no observer.
    """

    def __init__(self, spec: QuantizationSpec, setting: str) -> None:
        self.spec = spec
        super().__init__(lambda: _choosing_on_the_fly(make_observer(spec)), setting)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SpecObserverConstructor) and self.spec == other.spec

    def __hash__(self) -> int:
        return hash(self.spec)


def with_torchao_observer(spec: QuantizationSpec, setting: str) -> tuple[QuantizationSpec, nn.Module]:
    """Return ``spec`` with a constructor that torchao can use, and an observer that it makes.

    A spec that torchao can already use is returned unchanged.

    Raises:
        ConfigError: a constructor of torch.ao that cannot be translated; names ``setting``.
        Exception: any error that the constructor raises.
    """
    result = make_observer(spec)
    is_known = _is_known_to_torchao(spec) and _choosing_on_the_fly(result) is result
    if is_known and not any(is_of_torch_ao(module) for module in result.modules()):
        return spec, result
    constructor = SpecObserverConstructor(spec, setting)
    return replace(spec, observer_or_fake_quant_ctr=constructor), constructor()


def make_observer(spec: QuantizationSpec) -> nn.Module:
    """Call the constructor of ``spec`` with its settings, as torchao's prepare does.

    Raises:
        ConfigError: the constructor is an observer, whose own settings torchao would ignore.
        Exception: any error that the constructor raises.
    """
    settings = {field.name: getattr(spec, field.name) for field in fields(spec)}
    constructor: Any = settings.pop(CONSTRUCTOR)
    if isinstance(constructor, nn.Module):
        raise ConfigError.of("TQ910.observer_for_constructor", constructor=constructor)
    cls = class_of(constructor)
    if "PerChannel" not in getattr(cls, "__name__", ""):
        del settings["ch_axis"]
    if _takes_only_an_observer(cls):
        observer = constructor()._observer_ctr.with_args(**settings)
        module: nn.Module = constructor.with_args(observer=observer)()
    elif hasattr(constructor, "with_args"):
        module = constructor.with_args(**settings)()
    else:
        module = constructor(**settings)
    return module


def _choosing_on_the_fly(module: nn.Module) -> nn.Module:
    """Return ``module``, or a replacement if it is dynamic and its eps is a tensor: torchao's convert would
    write the tensor into the graph's code. Convert reads only the settings of a dynamic observer."""
    settings: Any = module
    if not getattr(module, "is_dynamic", False) or not isinstance(getattr(module, "eps", None), Tensor):
        return module
    given = {name: getattr(settings, name) for name in ("dtype", "quant_min", "quant_max", "qscheme")}
    observer = pt2e_observer.PlaceholderObserver(**given, eps=float(settings.eps), is_dynamic=True)
    return observer  # type: ignore[no-any-return]


def _is_known_to_torchao(spec: QuantizationSpec) -> bool:
    """Return whether torchao's prepare finds a name on the constructor, or inside one torchao partial."""
    constructor: Any = getattr(spec, CONSTRUCTOR)
    if isinstance(constructor, pt2e_observer.PartialWrapper):
        constructor = constructor.p.func
    is_named = hasattr(constructor, "__name__") and hasattr(getattr(spec, CONSTRUCTOR), "with_args")
    return is_named and not _takes_only_an_observer(class_of(constructor))


def _takes_only_an_observer(cls: Any) -> bool:
    return isinstance(cls, type) and issubclass(cls, FIXED)
