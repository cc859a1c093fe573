"""torchao's observers and fake-quantizes, recognized by torch.ao's functions too.

``torch.ao.quantization.disable_observer`` and related functions, through ``model.apply`` or called on a
module, test for torch.ao's base classes and silently ignore torchao's modules. The classes here are
subclasses of torchao's, registered as virtual subclasses of the legacy bases: the functions of both libraries
act on them, and torchao's own classes do not change.
"""

from __future__ import annotations

import torchao.quantization.pt2e.fake_quantize as pt2e_fake_quantize
import torchao.quantization.pt2e.observer as pt2e_observer
from torch import nn

from torchq_compat.support.torch_ao import fake_quantize as legacy_fake_quantize
from torchq_compat.support.torch_ao import observer as legacy_observer

__all__ = ["SUBCLASSES", "recognised_by_torch_ao"]

#: Without FixedQParamsObserver: FixedQParamsFakeQuantize requires that exact type; it has nothing to switch.
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
    """Class decorator: make torch.ao's functions accept this torchao observer or fake-quantize as theirs."""
    if issubclass(cls, pt2e_fake_quantize.FakeQuantizeBase):
        legacy_fake_quantize.FakeQuantizeBase.register(cls)
    else:
        legacy_observer.ObserverBase.register(cls)
    return cls


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
