"""torchao's observers and fake-quantizes, recognised by torch.ao's functions as well.

``torch.ao.quantization.disable_observer`` and related functions, through ``model.apply`` or called on a
module, test for torch.ao's base classes and silently do nothing to torchao's modules. The classes here are
torchao's, subclassed once and registered as virtual subclasses of the legacy bases: both worlds' functions
act on them, and nothing changes for torchao's own classes.
"""

from __future__ import annotations

import torchao.quantization.pt2e.fake_quantize as pt2e_fake_quantize
import torchao.quantization.pt2e.observer as pt2e_observer
from torch import nn

from torchq_compat.support.torch_ao import fake_quantize as legacy_fake_quantize
from torchq_compat.support.torch_ao import observer as legacy_observer

__all__ = ["SUBCLASSES", "recognised_by_torch_ao"]

#: Not FixedQParamsObserver: FixedQParamsFakeQuantize asks for that very type, and it has no state to switch.
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
    """Class decorator: let torch.ao's functions treat this torchao observer or fake-quantize as theirs."""
    if issubclass(cls, pt2e_fake_quantize.FakeQuantizeBase):
        legacy_fake_quantize.FakeQuantizeBase.register(cls)
    else:
        legacy_observer.ObserverBase.register(cls)
    return cls


def _subclass(base: type[nn.Module]) -> type[nn.Module]:
    return recognised_by_torch_ao(
        type(base.__name__, (base,), {"__module__": __name__, "__doc__": base.__doc__})
    )


#: Class by name. They are attributes of this module too, so that instances can be pickled.
SUBCLASSES: dict[str, type[nn.Module]] = {
    **{name: _subclass(getattr(pt2e_observer, name)) for name in OBSERVERS},
    **{name: _subclass(getattr(pt2e_fake_quantize, name)) for name in FAKE_QUANTIZES},
}
globals().update(SUBCLASSES)
