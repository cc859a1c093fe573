"""torchao's observers and fake-quantizes, recognized by torch.ao's functions too.

``torch.ao.quantization.disable_observer`` and related functions, through ``model.apply`` or called on a
module, test for torch.ao's base classes and silently ignore torchao's modules; scripts also test for its
``FakeQuantize`` or ``HistogramObserver``. The classes here are subclasses of torchao's, registered as virtual
subclasses of the legacy class of that name: the functions of both libraries act on them, and torchao's own
classes do not change.
"""

from __future__ import annotations

from typing import Any

import torchao.quantization.pt2e.fake_quantize as pt2e_fake_quantize
import torchao.quantization.pt2e.observer as pt2e_observer
from torch import nn

from torchq_compat.support.torch_ao import fake_quantize as legacy_fake_quantize
from torchq_compat.support.torch_ao import observer as legacy_observer

__all__ = ["SUBCLASSES", "recognised_by_torch_ao"]

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
