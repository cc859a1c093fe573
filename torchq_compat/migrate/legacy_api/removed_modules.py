"""Modules that torch has removed, and the new modules of their contents. Names only, without torch."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["REMOVED", "new_module"]

#: Legacy module -> the module that replaces it, submodules included; the longest match counts.
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
    """Return the new full name of ``name``, a removed module or something in one; None for any other name."""
    for old, new in REMOVED.items():
        if name == old or name.startswith(f"{old}."):
            return new + name[len(old) :]
    return None
