"""torchao's prepare and convert, without the cache that keeps every model they saw alive.

What they ask for the device of a model is a ``functools.cache`` keyed by the model (torchao 0.18),
as is its forerunner in torch.ao.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torchao.quantization.pt2e.quantize_pt2e as flow
from torch.fx import GraphModule
from torchao.quantization.pt2e.quantizer import Quantizer

from torchq_compat.support.upstream import DEVICE_CACHES

__all__ = ["convert_pt2e", "prepare_pt2e", "prepare_qat_pt2e"]


def prepare_pt2e(model: GraphModule, quantizer: Quantizer) -> GraphModule:
    """See torchao."""
    with _forgetting_models():
        prepared: GraphModule = flow.prepare_pt2e(model, quantizer)
        return prepared


def prepare_qat_pt2e(model: GraphModule, quantizer: Quantizer) -> GraphModule:
    """See torchao."""
    with _forgetting_models():
        prepared: GraphModule = flow.prepare_qat_pt2e(model, quantizer)
        return prepared


def convert_pt2e(model: GraphModule) -> GraphModule:
    """See torchao."""
    with _forgetting_models():
        converted: GraphModule = flow.convert_pt2e(model)
        return converted


@contextmanager
def _forgetting_models() -> Iterator[None]:
    try:
        yield
    finally:
        for module, name in DEVICE_CACHES:
            cached: Any = getattr(module, name, None)
            if cached is not None:
                cached.cache_clear()
