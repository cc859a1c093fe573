"""FX's qparams of a trained model: those of each fake-quantize's observer, over the whole range of the dtype.

Legacy: ``convert_fx`` of torch.ao asks the observer in a fake-quantize, whose symmetric scale is not that of
the fused kernel, and quantizes to all integers of the dtype, also where training clamped to fewer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchao.quantization.pt2e.fake_quantize import FakeQuantizeBase
from torchao.quantization.pt2e.observer import FixedQParamsObserver

from torchq_compat.qspecs.fused_fake_quantize import FusedFakeQuantize
from torchq_compat.qspecs.loaded_qparams import has_loaded_qparams
from torchq_compat.support.dtypes import SIXTEEN_BITS, dtype_range, is_integer, plain_dtype

__all__ = ["converts_otherwise", "use_observer_qparams"]

PER_CHANNEL = (torch.per_channel_affine, torch.per_channel_symmetric)


def converts_otherwise(module: nn.Module, *, is_trained: bool) -> bool:
    """Return whether FX converts ``module`` to other qparams than it fake-quantizes with, or, if it
    ``is_trained``, to another range."""
    if not _has_a_choice(module):
        return False
    source: Any = getattr(module, "activation_post_process", module)
    whole = dtype_range(plain_dtype(module.dtype))  # type: ignore[arg-type]
    if is_trained and (source.quant_min, source.quant_max) != whole:
        return True
    if not isinstance(module, FusedFakeQuantize) or has_loaded_qparams(module):
        return False
    pairs = zip(module.trained_qparams(), source.calculate_qparams(), strict=True)
    return not all(torch.equal(trained.to(observed.dtype), observed) for trained, observed in pairs)


def use_observer_qparams(module: nn.Module) -> None:
    """Let ``module``, if it is a fake-quantize, convert with its observer's qparams, channels to the whole
    range of the dtype. The range of qparams per tensor is chosen where they are frozen."""
    if not _has_a_choice(module):
        return
    if isinstance(module, FusedFakeQuantize):
        module.converts_as_observed = True
    if module.qscheme in PER_CHANNEL:
        low, high = dtype_range(plain_dtype(module.dtype))  # type: ignore[arg-type]
        module.quant_min, module.quant_max = low, high  # type: ignore[assignment]


def _has_a_choice(module: nn.Module) -> bool:
    """Return whether ``module`` is a static fake-quantize to integers that FX has, without fixed qparams and
    without a conversion of its own."""
    if not isinstance(module, FakeQuantizeBase) or getattr(module, "is_dynamic", False):
        return False
    if hasattr(module, "convert"):
        return False
    if isinstance(getattr(module, "activation_post_process", None), FixedQParamsObserver):
        return False
    dtype = plain_dtype(module.dtype)
    return is_integer(dtype) and dtype not in SIXTEEN_BITS
