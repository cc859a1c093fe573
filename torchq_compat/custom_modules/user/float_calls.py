"""Converts non-traceable modules whose class the script maps.

Legacy: ``ConvertCustomConfig.set_observed_to_quantized_mapping`` with a class that prepare only named
non-traceable. FX calls ``from_observed`` of the mapped class, passes the new module the quantized tensor of a
quantized producer, and dequantizes the results.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from torchq_compat.custom_modules.user.handler import made_by
from torchq_compat.opaque_calls.opaque_module import OpaqueModule
from torchq_compat.qspecs.qdq import DEQUANTIZE
from torchq_compat.support.dtypes import LEGACY_DTYPES
from torchq_compat.support.quantized_tensors import as_float, quantize
from torchq_compat.support.upstream import pytree

__all__ = ["QuantizedCall", "convert_float_calls"]


class QuantizedCall(nn.Module):
    """A quantized module that is called with floats and returns floats.

    Args:
        quantized: the user's module.
        qparams: (scale, zero point, torch.ao dtype) of the first argument, if its producer is quantized.
    """

    def __init__(self, quantized: nn.Module, qparams: tuple[float, int, torch.dtype] | None) -> None:
        super().__init__()
        self.quantized = quantized
        self.qparams = qparams

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.qparams is not None:
            args = (quantize(args[0], *self.qparams), *args[1:])
        return pytree.tree_map_only(Tensor, as_float, self.quantized(*args, **kwargs))


def convert_float_calls(
    converted: GraphModule, mapping: Mapping[type[nn.Module], type[nn.Module]]
) -> dict[str, type[nn.Module]]:
    """Replace every module of a ``mapping`` class that the graph calls with floats; return path -> new class.

    Raises:
        CustomModuleError: if ``from_observed`` of a quantized class fails.
    """
    replaced: dict[str, type[nn.Module]] = {}
    for node in converted.graph.nodes:
        path = str(node.target)
        if node.op != "call_module" or path in replaced:
            continue
        module = converted.get_submodule(path)
        if isinstance(module, OpaqueModule) or type(module) not in mapping:
            continue
        quantized_class = mapping[type(module)]
        quantized = made_by(quantized_class, "from_observed", module, path)
        takes_floats = getattr(quantized, "takes_floats", False)
        converted.set_submodule(path, QuantizedCall(quantized, None if takes_floats else _qparams(node)))
        replaced[path] = quantized_class
    return replaced


def _qparams(call: Node) -> tuple[float, int, torch.dtype] | None:
    producer = call.args[0] if call.args else None
    if not isinstance(producer, Node) or producer.target is not DEQUANTIZE:
        return None
    scale, zero_point, dtype = producer.args[1], producer.args[2], producer.args[5]
    assert isinstance(scale, float)
    assert isinstance(zero_point, int)
    legacy = LEGACY_DTYPES.get(dtype)  # type: ignore[arg-type]
    return None if legacy is None else (scale, zero_point, legacy)
