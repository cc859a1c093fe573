"""ExecuTorch's Quantizer for XNNPACK, imported when it is asked for.

It exports the twelve patterns of a convolution and its batch norm anew each time it annotates, which takes
two seconds. Here each is exported once a session, and copied.
"""

from __future__ import annotations

import copy
import functools
import importlib
from typing import Any

from torch.fx import GraphModule
from torchao.quantization.pt2e.quantizer import Quantizer

__all__ = ["xnnpack_quantizer"]

HOME = "executorch.backends.xnnpack.quantizer"


@functools.cache
def _with_patterns_exported_once() -> Any:
    utils: Any = importlib.import_module(f"{HOME}.xnnpack_quantizer_utils")
    export, patterns = utils._get_aten_graph_module_for_pattern, dict[Any, GraphModule]()

    def exported_once(pattern: Any, inputs: tuple[Any, ...], is_cuda: bool = False) -> GraphModule:
        differs_in = *(cell.cell_contents for cell in pattern.fn.__closure__), is_cuda
        key = differs_in, tuple(value.shape for value in inputs)
        if key not in patterns:
            patterns[key] = export(pattern, inputs, is_cuda)
        return copy.deepcopy(patterns[key])

    utils._get_aten_graph_module_for_pattern = exported_once
    return importlib.import_module(f"{HOME}.xnnpack_quantizer")


def xnnpack_quantizer() -> Quantizer:
    module = _with_patterns_exported_once()
    quantizer: Quantizer = module.XNNPACKQuantizer()
    return quantizer.set_global(module.get_symmetric_quantization_config())
