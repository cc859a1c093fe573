"""A user's QuantizationSpec with an observer of torch.ao in it, as the old tutorials import them.

torchao takes such an observer, calibrates it, and quantizes nothing: its convert looks for its own base
classes. With ``.with_args`` its prepare fails, for it reads the ``__name__`` of what it takes for a class.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torchao.quantization.pt2e.fake_quantize as pt2e_fake_quantize
import torchao.quantization.pt2e.observer as pt2e_observer
from torch import nn
from torchao.quantization.pt2e.quantizer import QuantizationSpec

from torchq_compat.qspecs.observers import ObserverConstructor
from torchq_compat.support.torch_ao import fake_quantize as legacy_fake_quantize
from torchq_compat.support.torch_ao import observer as legacy_observer

__all__ = ["SpecObserverConstructor", "with_torchao_observer"]

LEGACY_BASES = (legacy_observer.ObserverBase, legacy_fake_quantize.FakeQuantizeBase)
PT2E_BASES = (pt2e_observer.ObserverBase, pt2e_fake_quantize.FakeQuantizeBase)
CONSTRUCTOR = "observer_or_fake_quant_ctr"


class SpecObserverConstructor(ObserverConstructor):
    """Makes the torchao observers of one spec; equal for equal specs, so that torchao shares their observers.

    Args:
        spec: with a constructor of torch.ao, or one whose class torchao cannot see.
        setting: what to call it in error messages.

    Raises:
        ConfigError: it makes no observer.
    """

    def __init__(self, spec: QuantizationSpec, setting: str) -> None:
        self.spec = spec
        super().__init__(lambda: make_observer(spec), setting)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SpecObserverConstructor) and self.spec == other.spec

    def __hash__(self) -> int:
        return hash(self.spec)


def with_torchao_observer(spec: QuantizationSpec, setting: str) -> tuple[QuantizationSpec, nn.Module]:
    """Return ``spec`` with a constructor that torchao can use, and an observer it makes.

    One that torchao can use already is returned as it is.

    Raises:
        ConfigError: a constructor of torch.ao that cannot be translated; names ``setting``.
        Exception: what the constructor raises.
    """
    made = make_observer(spec)
    if not any(_is_legacy(module) for module in made.modules()) and _is_known_to_torchao(spec):
        return spec, made
    constructor = SpecObserverConstructor(spec, setting)
    return replace(spec, observer_or_fake_quant_ctr=constructor), constructor()


def make_observer(spec: QuantizationSpec) -> nn.Module:
    """Call the constructor of ``spec`` with its settings, as torchao's prepare does."""
    settings = {field.name: getattr(spec, field.name) for field in fields(spec)}
    constructor: Any = settings.pop(CONSTRUCTOR)
    if "PerChannel" not in getattr(_class_of(constructor), "__name__", ""):
        del settings["ch_axis"]
    made: nn.Module = constructor.with_args(**settings)()
    return made


def _is_legacy(module: nn.Module) -> bool:
    # Some of our classes are torchao's, and pass for torch.ao's.
    return isinstance(module, LEGACY_BASES) and not isinstance(module, PT2E_BASES)


def _is_known_to_torchao(spec: QuantizationSpec) -> bool:
    """Whether torchao's prepare finds a name on the constructor, or one level inside a partial of its own."""
    constructor: Any = getattr(spec, CONSTRUCTOR)
    if isinstance(constructor, pt2e_observer.PartialWrapper):
        constructor = constructor.p.func
    return hasattr(constructor, "__name__")


def _class_of(constructor: Any) -> Any:
    """The class at the bottom of ``Class.with_args(...).with_args(...)``."""
    while hasattr(constructor, "p"):
        constructor = constructor.p.func
    return constructor
