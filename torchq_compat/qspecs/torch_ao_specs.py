"""A user's QuantizationSpec with an observer of torch.ao, as the old tutorials import them.

torchao accepts such an observer, calibrates it, and quantizes nothing: its convert looks for its own base
classes. With ``.with_args``, its prepare fails, because it reads ``__name__`` of a value that is no class.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import Any

import torchao.quantization.pt2e.fake_quantize as pt2e_fake_quantize
import torchao.quantization.pt2e.observer as pt2e_observer
from torch import Tensor, nn
from torchao.quantization.pt2e.quantizer import QuantizationSpec

from torchq_compat.errors import ConfigError
from torchq_compat.qspecs.observers import ObserverConstructor
from torchq_compat.support.torch_ao import fake_quantize as legacy_fake_quantize
from torchq_compat.support.torch_ao import observer as legacy_observer

__all__ = ["SpecObserverConstructor", "with_torchao_observer"]

LEGACY_BASES = (legacy_observer.ObserverBase, legacy_fake_quantize.FakeQuantizeBase)
PT2E_BASES = (pt2e_observer.ObserverBase, pt2e_fake_quantize.FakeQuantizeBase)
FIXED_QPARAMS_FAKE_QUANTIZES = (
    legacy_fake_quantize.FixedQParamsFakeQuantize,
    pt2e_fake_quantize.FixedQParamsFakeQuantize,
)
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
    made = make_observer(spec)
    is_known = _is_known_to_torchao(spec) and _choosing_on_the_fly(made) is made
    if is_known and not any(_is_legacy(module) for module in made.modules()):
        return spec, made
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
        raise ConfigError(
            f"the constructor of a spec is an observer: {type(constructor).__name__}(...).",
            hint="pass a class or Class.with_args(...), not an instance or its result.",
        )
    cls = _class_of(constructor)
    if "PerChannel" not in getattr(cls, "__name__", ""):
        del settings["ch_axis"]
    if _takes_only_an_observer(cls):
        observer = constructor()._observer_ctr.with_args(**settings)
        made: nn.Module = constructor.with_args(observer=observer)()
    elif hasattr(constructor, "with_args"):
        made = constructor.with_args(**settings)()
    else:
        made = constructor(**settings)
    return made


def _choosing_on_the_fly(made: nn.Module) -> nn.Module:
    """Return ``made``, or a replacement if it is dynamic and its eps is a tensor: torchao's convert would
    write the tensor into the graph's code. Convert reads only the settings of a dynamic observer."""
    settings: Any = made
    if not getattr(made, "is_dynamic", False) or not isinstance(getattr(made, "eps", None), Tensor):
        return made
    stands_for: nn.Module = pt2e_observer.PlaceholderObserver(
        dtype=settings.dtype,
        quant_min=settings.quant_min,
        quant_max=settings.quant_max,
        qscheme=settings.qscheme,
        eps=float(settings.eps),
        is_dynamic=True,
    )
    return stands_for


def _is_legacy(module: nn.Module) -> bool:
    # Some of our classes are torchao's and registered as torch.ao's.
    return isinstance(module, LEGACY_BASES) and not isinstance(module, PT2E_BASES)


def _is_known_to_torchao(spec: QuantizationSpec) -> bool:
    """Return whether torchao's prepare finds a name on the constructor, or inside one torchao partial."""
    constructor: Any = getattr(spec, CONSTRUCTOR)
    if isinstance(constructor, pt2e_observer.PartialWrapper):
        constructor = constructor.p.func
    is_named = hasattr(constructor, "__name__") and hasattr(getattr(spec, CONSTRUCTOR), "with_args")
    return is_named and not _takes_only_an_observer(_class_of(constructor))


def _takes_only_an_observer(cls: Any) -> bool:
    return isinstance(cls, type) and issubclass(cls, FIXED_QPARAMS_FAKE_QUANTIZES)


def _class_of(constructor: Any) -> Any:
    """Return the innermost class of ``Class.with_args(...).with_args(...)``."""
    while hasattr(constructor, "p") or isinstance(constructor, partial):
        constructor = getattr(constructor, "p", constructor).func
    return constructor
