"""Whether QConfigs suit the function they are given to: fake-quantizes train, observers calibrate."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torchao.quantization.pt2e.fake_quantize as pt2e_fake_quantize

from torchq_compat.support.torch_ao import NoopObserver, PlaceholderObserver, QConfig
from torchq_compat.support.torch_ao import fake_quantize as legacy_fake_quantize

__all__ = ["misfit"]

FAKE_QUANTIZES = (legacy_fake_quantize.FakeQuantizeBase, pt2e_fake_quantize.FakeQuantizeBase)
WITHOUT_RANGE = (NoopObserver, PlaceholderObserver)
#: Fake-quantizes with given qparams: they are the same in calibration and in training.
FIXED = (legacy_fake_quantize.FixedQParamsFakeQuantize, pt2e_fake_quantize.FixedQParamsFakeQuantize)


def misfit(qconfigs: Iterable[QConfig | None], *, is_qat: bool) -> str:
    """Return a warning about ``qconfigs`` in this mode; empty if they suit it."""
    pairs = [
        [
            made
            for made in map(_class_of, (qconfig.activation, qconfig.weight))
            if isinstance(made, type) and not issubclass(made, WITHOUT_RANGE)
        ]
        for qconfig in qconfigs
        if isinstance(qconfig, QConfig)
    ]
    classes = [made for pair in pairs for made in pair]
    fakes = [made for made in classes if issubclass(made, FAKE_QUANTIZES)]
    if is_qat and classes and not fakes:
        return (
            "prepare_qat_fx: the qconfig_mapping has observers and no fake-quantize, so training does not "
            "see the rounding. Hint: give get_default_qat_qconfig_mapping(...), or call prepare_fx."
        )
    # A QConfig with a single fake-quantize is not for training: torch.ao has such QConfigs for calibration.
    if not is_qat and any(len(pair) == 2 and all(map(_is_learnt, pair)) for pair in pairs):
        return (
            "prepare_fx: the qconfig_mapping has fake-quantizes, which are for training: in calibration "
            "each layer gets inputs that the layers before it have rounded, and ranges are moving averages. "
            "Hint: give get_default_qconfig_mapping(...), or call prepare_qat_fx."
        )
    return ""


def _is_learnt(made: type) -> bool:
    return issubclass(made, FAKE_QUANTIZES) and not issubclass(made, FIXED)


def _class_of(constructor: Any) -> Any:
    """Return the class of ``Class``, of ``Class.with_args(...)`` or of a partial of it."""
    for _ in range(8):
        inner = getattr(constructor, "p", constructor)
        function = getattr(inner, "func", inner)
        if function is constructor:
            break
        constructor = function
    return constructor
