"""ExecuTorch's Quantizer for XNNPACK, imported when it is asked for.

It exports the twelve patterns of a convolution and its batch norm anew each time it annotates.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from torchao.quantization.pt2e.quantizer import Quantizer

from tests.helpers.exported_patterns import exporting_once

__all__ = ["xnnpack_quantizer"]

HOME = "executorch.backends.xnnpack.quantizer"


@functools.cache
def _with_patterns_exported_once() -> Any:
    utils: Any = importlib.import_module(f"{HOME}.xnnpack_quantizer_utils")
    utils._get_aten_graph_module_for_pattern = exporting_once(utils._get_aten_graph_module_for_pattern)
    return importlib.import_module(f"{HOME}.xnnpack_quantizer")


def xnnpack_quantizer() -> Quantizer:
    module = _with_patterns_exported_once()
    quantizer: Quantizer = module.XNNPACKQuantizer()
    return quantizer.set_global(module.get_symmetric_quantization_config())
