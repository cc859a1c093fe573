"""torchao's prepare and convert, without the cache that keeps every model they were given alive.

Their function for the device of a model is a ``functools.cache`` keyed by the model (torchao 0.18), as is its
predecessor in torch.ao.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torchao.quantization.pt2e.quantize_pt2e as flow
from torch.fx import GraphModule
from torchao.quantization.pt2e.quantizer import Quantizer

from torchq_compat.support.upstream import DEVICE_CACHES


def prepare_pt2e(model: GraphModule, quantizer: Quantizer) -> GraphModule:
    """Call torchao's ``prepare_pt2e``."""
    with _forgetting_models():
        prepared: GraphModule = flow.prepare_pt2e(model, quantizer)
        return prepared


def prepare_qat_pt2e(model: GraphModule, quantizer: Quantizer) -> GraphModule:
    """Call torchao's ``prepare_qat_pt2e``."""
    with _forgetting_models():
        prepared: GraphModule = flow.prepare_qat_pt2e(model, quantizer)
        return prepared


def convert_pt2e(model: GraphModule, **options: bool) -> GraphModule:
    """Call torchao's ``convert_pt2e`` with its ``options``.

    Its constant folding runs the graph with placeholder objects in place of values. A PackedSequence, and any
    class that inspects its contents, cannot be built from them, so the result has no structure meanwhile.
    """
    info = getattr(model.graph._codegen, "pytree_info", None)
    with _forgetting_models():
        if info is None:
            converted: GraphModule = flow.convert_pt2e(model, **options)
            return converted
        _set_structure(model, info._replace(out_spec=None))
        try:
            converted = flow.convert_pt2e(model, **options)
        finally:
            _set_structure(model, info)
        _set_structure(converted, info)
        converted.recompile()
        return converted


def _set_structure(model: GraphModule, info: Any) -> None:
    codegen: Any = model.graph._codegen
    codegen.pytree_info = info


@contextmanager
def _forgetting_models() -> Iterator[None]:
    try:
        yield
    finally:
        for module, name in DEVICE_CACHES:
            cached: Any = getattr(module, name, None)
            if cached is not None:
                cached.cache_clear()
