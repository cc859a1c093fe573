"""Translate a torch.ao observer or fake-quantize to the torchao class that PT2E recognizes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, Self

import torch
import torchao.quantization.pt2e.fake_quantize as pt2e_fake_quantize
import torchao.quantization.pt2e.observer as pt2e_observer
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from torchq_compat.errors import ConfigError
from torchq_compat.read import observer_classes, qparams, torch_ao_classes
from torchq_compat.read.qdq import CONVERT_DTYPE, insert_dynamic_q_dq
from torchq_compat.support.dtypes import KERNEL_DTYPES, PACKED_DTYPES, dtype_range, is_integer, plain_dtype
from torchq_compat.support.graph_nodes import attribute_at, replace_node, source_of
from torchq_compat.support.process_state import Kept
from torchq_compat.support.torch_ao import PlaceholderObserver, QConfig
from torchq_compat.support.torch_ao import fake_quantize as legacy_fake_quantize
from torchq_compat.support.torch_ao import observer as legacy_observer
from torchq_compat.support.user_warnings import silenced

# With legacy objects in a torchao QuantizationSpec, prepare and calibration raise no error but yield no
# q-dq at all, because torchao tests for its own base classes. A class that torchao has under the same name
# is rebuilt from the attributes of a legacy instance; any other class, such as a user's own, is wrapped in
# an adapter.


LegacyConstructor = Callable[[], nn.Module]
HOMES = (legacy_observer, legacy_fake_quantize, pt2e_observer, pt2e_fake_quantize)
# Constructor arguments that are stored in an attribute of another name.
ATTRIBUTE_OF_ARGUMENT = {"custom_op_name": "custom_op"}

#: Classes that are replaced by this package's versions, which report more or are faster.
REPLACED: dict[str, Callable[..., nn.Module]] = {
    "FusedMovingAvgObsFakeQuantize": observer_classes.FusedFakeQuantize,
    "HistogramObserver": observer_classes.FastHistogramObserver,
    "MinMaxObserver": observer_classes.FastMinMaxObserver,
    "MovingAverageMinMaxObserver": observer_classes.SaturationCountingObserver,
}
#: (id of a legacy constructor, setting) -> its translation, which keeps it alive: every op asks anew.
_TRANSLATED: Kept[ObserverConstructor] = Kept(64)
#: The warnings that were already passed on.
_SHOWN: set[str] = set()


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
        with silenced(_was_shown):
            observer = self._make_legacy()
        self.settings = torch_ao_classes.read_settings(self(), observer, setting)
        self.__name__ = "PerChannelObserver" if self.settings.ch_axis is not None else "Observer"

    def with_args(self, **_spec: Any) -> ObserverConstructor:
        return self

    def __call__(self) -> nn.Module:
        # Both libraries warn about reduce_range; the user's script chose it, not this package.
        with silenced():
            return _translate(self._make_legacy())

    def _make_legacy(self) -> nn.Module:
        if not callable(self.legacy) or isinstance(self.legacy, nn.Module):
            raise _not_a_constructor(self.setting, self.legacy)
        try:
            result = self.legacy()
        except Warning:
            raise  # The user made errors of them.
        except TypeError as cause:
            raise _not_a_constructor(self.setting, self.legacy) from cause
        except Exception as cause:
            raise ConfigError.of(
                "TQ910.observer_cannot_be_made", setting=self.setting, cause=cause
            ) from cause
        if not isinstance(result, (*torch_ao_classes.PT2E_BASES, *torch_ao_classes.LEGACY_BASES)):
            raise _not_a_constructor(self.setting, self.legacy)
        return result


def _was_shown(text: str) -> bool:
    """Return whether a library warned with ``text`` before: every rule makes observers anew."""
    if text in _SHOWN:
        return True
    _SHOWN.add(text)
    return False


def translate_constructor(legacy: LegacyConstructor, setting: str = "qconfig") -> ObserverConstructor:
    """Return ``legacy`` as a constructor of torchao observers, unchanged if it already is one."""
    if isinstance(legacy, ObserverConstructor):
        return legacy
    return _TRANSLATED.of((id(legacy), setting), lambda: ObserverConstructor(legacy, setting))


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


def _translate(module: nn.Module) -> nn.Module:
    name = type(module).__name__
    # By identity: a user may reuse a name.
    is_known = any(getattr(home, name, None) is type(module) for home in HOMES)
    ours = REPLACED.get(name) or torch_ao_classes.SUBCLASSES.get(name)
    mirror: Callable[..., nn.Module] | None
    mirror = (ours or getattr(pt2e_observer, name, None)) if is_known else None
    if mirror is None:
        return adapted(module)
    if (inner := getattr(module, "activation_post_process", None)) is not None:
        if getattr(inner, "qscheme", None) is torch.per_channel_affine_float_qparams:
            mirror = qparams.FloatQParamsFakeQuantize
        return mirror(observer=lambda **_: _translate(inner))
    return mirror(**_arguments_from_attributes(mirror, module))


def adapted(module: nn.Module) -> nn.Module:
    """Return an observer for torchao: unchanged if derived from its classes, else as part of an adapter."""
    if isinstance(module, torch_ao_classes.PT2E_BASES):
        torchao_own: nn.Module = module
        return torchao_own
    if isinstance(module, legacy_fake_quantize.FakeQuantizeBase):
        return LegacyFakeQuantizeAdapter(module)
    return LegacyObserverAdapter(module)


def _arguments_from_attributes(mirror: Any, module: nn.Module) -> dict[str, Any]:
    # The class whose constructor names the arguments; our subclasses pass them on.
    is_torchao_own = getattr(pt2e_observer, mirror.__name__, None) is mirror
    arguments: dict[str, Any] = {}
    for name in _parameters(mirror if is_torchao_own else mirror.__bases__[0]):
        attribute = ATTRIBUTE_OF_ARGUMENT.get(name, name)
        if hasattr(module, attribute):
            value = getattr(module, attribute)
            value = value.item() if isinstance(value, Tensor) else value
            arguments[name] = plain_dtype(value) if isinstance(value, torch.dtype) else value
    if getattr(module, "has_customized_qrange", False):
        arguments["reduce_range"] = False  # A given range is stored already reduced.
    elif hasattr(module, "has_customized_qrange") and module.dtype not in PACKED_DTYPES:
        del arguments["quant_min"], arguments["quant_max"]
    limits: Any = module
    if isinstance(module, torch_ao_classes.FIXED_QPARAMS):
        # FixedQParamsObserver stores 0..255 for every dtype if the user gave no range. FX's quantize op
        # ignores the stored range; PT2E's op clamps to it, which turns a 32-bit part into zeros.
        given = limits.quant_min, limits.quant_max
        low, high = dtype_range(limits.dtype) if given == (0, 255) else given
        arguments["quant_min"], arguments["quant_max"] = low, high
    return arguments


@cache
def _parameters(observer_class: Callable[..., nn.Module]) -> tuple[str, ...]:
    return tuple(inspect.signature(observer_class).parameters)


class _Adapter(nn.Module):
    """The base of adapters: the user's object, ``legacy``, observes and computes the qparams."""

    legacy: Any

    def __init__(self, legacy: Any, **settings: Any) -> None:
        super().__init__(**settings)
        self.legacy = legacy
        # torchao's convert reads these of the adapter itself.
        self.dtype: Any = plain_dtype(legacy.dtype)
        low, high = dtype_range(self.dtype) if is_integer(self.dtype) else (None, None)
        source = getattr(legacy, "activation_post_process", legacy)
        defaults = {"qscheme": torch.per_tensor_affine, "quant_min": low, "quant_max": high, "ch_axis": None}
        for name, default in defaults.items():
            given = (getattr(owner, name, None) for owner in (legacy, source))
            value = next((item for item in given if item is not None), default)
            if name != "ch_axis" or value is not None:
                setattr(self, name, value)
        self.is_dynamic: Any = bool(getattr(legacy, "is_dynamic", False))

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the user's object: ``scale`` of a learnable one, or ``min_val``."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            legacy = vars(self).get("_modules", {}).get("legacy")
            # activation_post_process is read to find out whether the adapter has an observer of its own.
            is_private = name.startswith("_") or name == "activation_post_process"
            if legacy is None or is_private or not hasattr(legacy, name):
                raise
            return getattr(legacy, name)

    def calculate_qparams(self, **_: Any) -> tuple[Tensor, Tensor]:
        scale, zero_point = self.legacy.calculate_qparams()
        return scale, zero_point


@torch_ao_classes.recognised_by_torch_ao
class LegacyObserverAdapter(_Adapter, pt2e_observer.ObserverBase):  # type: ignore[misc]
    """A user's own torch.ao observer as a torchao observer; the user's object does the observing."""

    def __init__(self, legacy: nn.Module) -> None:
        super().__init__(legacy, dtype=plain_dtype(legacy.dtype))  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        self.legacy(x)
        return x


@torch_ao_classes.recognised_by_torch_ao
class LegacyFakeQuantizeAdapter(_Adapter, pt2e_fake_quantize.FakeQuantizeBase):  # type: ignore[misc]
    """A user's own torch.ao fake-quantize, or torch.ao's private learnable one, as a torchao class."""

    def forward(self, x: Tensor) -> Tensor:
        fake_quantized: Tensor = self.legacy(x)
        return fake_quantized

    @property
    def learns_qparams(self) -> bool:
        """Whether torch.ao's learnable fake-quantize trains its qparams instead of observing them."""
        learning = getattr(self.legacy, "learning_enabled", None)
        return isinstance(learning, Tensor) and bool(learning)

    def enable_fake_quant(self, enabled: bool = True) -> None:
        self.legacy.enable_fake_quant(enabled)

    def enable_observer(self, enabled: bool = True) -> None:
        self.legacy.enable_observer(enabled)


def _not_a_constructor(setting: str, value: object) -> ConfigError:
    return ConfigError.of("TQ910.no_constructor", setting=setting, value=value)


# Weight observers that observe the weight once, at convert, as FX's do.
#
# torchao puts the weight observer into the graph, where it would run on the same unchanged weight in every
# calibration call and, in a recurrent cell, in every time step.


@torch_ao_classes.recognised_by_torch_ao
class WeightObserver(pt2e_observer.ObserverBase):  # type: ignore[misc]
    """Passes the weight through in calibration; ``observe`` observes it."""

    #: Whether its calls in calibration leave its qparams unchanged.
    observes_at_convert = True

    def __init__(self, constructor: ObserverConstructor) -> None:
        settings = constructor.settings
        super().__init__(dtype=settings.dtype, is_dynamic=settings.is_dynamic)
        self.constructor = constructor
        self.observer = constructor()
        torch_ao_classes.take_settings(self, settings)

    def forward(self, weight: Tensor) -> Tensor:
        return weight

    def observe(self, weight: Tensor) -> None:
        """Discard earlier observations and observe ``weight`` as it is now."""
        if not qparams.is_on_loaded_qparams(self, weight.detach()):
            qparams.release_qparams(self)
        self.observer = self.constructor().to(weight.device)
        self.observer(weight.detach())

    def observe_weight(self, weight: Tensor, path: str) -> None:
        """``observe`` the ``weight`` at ``path``.

        Raises:
            ConfigError: the observer fails on the weight.
        """
        try:
            self.observe(weight)
        except Exception as cause:  # The observer may be a user's own.
            raise ConfigError.of("TQ910.weight_observer", path=path, cause=cause) from cause

    def calculate_qparams(self, **_: Any) -> tuple[Tensor, Tensor]:
        if (loaded := qparams.loaded_qparams(self)) is not None:
            return loaded
        scale, zero_point = self.observer.calculate_qparams()  # type: ignore[operator]
        return scale, zero_point


class FloatQParamsWeightObserver(WeightObserver):
    """The weight observer of embeddings, whose zero points are floats."""

    def convert(self, model: GraphModule, observer_node: Node) -> None:
        """Replace ``observer_node`` by the dequantize of a folded integer weight; torchao calls this."""
        source = source_of(observer_node)
        self.observe_weight(attribute_at(model, str(source.target)), str(source.target))
        scale, zero_point = self.calculate_qparams()
        qparams.fold_weight(model, observer_node, scale, zero_point, self)


class WeightConstructor(ObserverConstructor):
    """An ``ObserverConstructor`` whose observers observe at this package's convert."""

    def __init__(self, constructor: ObserverConstructor) -> None:
        vars(self).update(vars(constructor))
        self.constructor = constructor
        self._has_float_zero_points = self.settings.qscheme is torch.per_channel_affine_float_qparams

    @property
    def for_any_convert(self) -> ObserverConstructor:
        """A constructor for torchao's own convert too: it needs observers that have observed, except for
        float zero points, whose observers have a ``convert``."""
        return self if self._has_float_zero_points else self.constructor

    def __call__(self) -> nn.Module:
        if self._has_float_zero_points:
            return FloatQParamsWeightObserver(self.constructor)
        return WeightObserver(self.constructor)


# Dynamic quantization: qparams chosen from each tensor at run time, as ``torch.quantize_per_tensor_dynamic``
# does in FX's reference graphs.
#
# FX reads only the dtype of a dynamic observer. The qparams are affine over the range of the dtype, or over
# half of it if the quantized engine could overflow. ``WholeRangeObserver`` requests the whole range on every
# engine: this package's own matrix products accumulate in 32 bits.


#: Engines whose kernels add two products in 16 bits; FX sets ``reduce_range`` for them.
ENGINES_OF_REDUCED_RANGE = ("fbgemm", "x86")
#: The smallest scale that ATen chooses.
SMALLEST_SCALE = 6.1e-5


class WholeRangeObserver(PlaceholderObserver):
    """A dynamic observer, as torch.ao's, whose tensors use all integers of its dtype on every engine.

    FX and torch.ao ignore the difference: to them it is the dynamic observer of its dtype.

    Args:
        dtype: torch.quint8 or torch.qint8.
        arguments: keyword arguments of torch.ao's ``PlaceholderObserver``.
    """

    whole_range = True

    def __init__(self, dtype: torch.dtype = torch.quint8, **arguments: Any) -> None:
        low, high = dtype_range(dtype)
        super().__init__(
            **{**arguments, "dtype": dtype, "quant_min": low, "quant_max": high, "is_dynamic": True}
        )


def with_whole_range(qconfig: QConfig) -> QConfig | None:
    """Return ``qconfig`` with a ``WholeRangeObserver`` as activation; None if its activations are not dynamic
    8-bit integers.

    Raises:
        ConfigError: its activation makes no observer.
    """
    settings = translate_constructor(qconfig.activation).settings
    if not settings.is_dynamic or settings.dtype not in KERNEL_DTYPES:
        return None
    activation = WholeRangeObserver.with_args(dtype=settings.declared_dtype)
    return QConfig(activation=activation, weight=qconfig.weight)  # type: ignore[no-untyped-call]


def asks_for_whole_range(qconfig: QConfig) -> bool:
    """Return whether the activation of ``qconfig`` is a ``WholeRangeObserver``."""
    cls = torch_ao_classes.class_of(qconfig.activation)
    return isinstance(cls, type) and issubclass(cls, WholeRangeObserver)


@torch_ao_classes.recognised_by_torch_ao
class DynamicQuantization(pt2e_observer.ObserverBase):  # type: ignore[misc]
    """Takes the place of a dynamic observer; torchao's convert calls ``convert``."""

    def __init__(self, dtype: torch.dtype, *, whole_range: bool = False) -> None:
        super().__init__(dtype=dtype, is_dynamic=True)
        self.whole_range = whole_range

    @classmethod
    def of(cls, observer: nn.Module) -> Self:
        """Return the replacement of a dynamic ``observer``."""
        dtype = plain_dtype(observer.dtype)  # type: ignore[arg-type]
        return cls(dtype, whole_range=bool(getattr(observer, "whole_range", False)))

    def forward(self, x: Tensor) -> Tensor:
        return x

    def calculate_qparams(self, **_: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("the qparams are chosen from each tensor")

    def convert(self, model: GraphModule, observer_node: Node) -> None:
        """Replace ``observer_node`` by nodes that quantize and dequantize its input."""
        source = source_of(observer_node)
        graph = model.graph
        with graph.inserting_before(observer_node):
            if self.dtype is torch.float16:
                half = graph.call_function(CONVERT_DTYPE, (source, torch.float16))
                result = graph.call_function(CONVERT_DTYPE, (half, torch.float32))
            else:
                low, high = limits = dtype_range(self.dtype)
                if torch.backends.quantized.engine in ENGINES_OF_REDUCED_RANGE and not self.whole_range:
                    low, high = int(low / 2), int(high / 2)
                result = insert_dynamic_q_dq(graph, source, (low, high), limits, SMALLEST_SCALE, self.dtype)
            replace_node(observer_node, result)
