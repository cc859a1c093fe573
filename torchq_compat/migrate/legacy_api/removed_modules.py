"""Modules that torch has removed, and where their contents are now. Names only, without torch."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["REMOVED", "new_module"]

#: Legacy module -> the module in its place; what lies deeper follows, the longest name first.
REMOVED: Mapping[str, str] = {
    "torch.ao.quantization.quantizer.xnnpack_quantizer_utils": (
        "executorch.backends.xnnpack.quantizer.xnnpack_quantizer_utils"
    ),
    "torch.ao.quantization.quantizer.xnnpack_quantizer": (
        "executorch.backends.xnnpack.quantizer.xnnpack_quantizer"
    ),
    "torch.ao.quantization.quantize_pt2e": "torchao.quantization.pt2e.quantize_pt2e",
    "torch.ao.quantization.quantizer": "torchao.quantization.pt2e.quantizer",
    "torch.ao.quantization.pt2e": "torchao.quantization.pt2e",
}


def new_module(name: str) -> str | None:
    """``name``, a removed module or something in one, where it is now; None for any other name."""
    for old, new in REMOVED.items():
        if name == old or name.startswith(f"{old}."):
            return new + name[len(old) :]
    return None
