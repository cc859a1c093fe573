"""Legacy FX graph mode quantization scripts, on torch.export and torchao's PT2E."""

from torchq_compat.errors import TorchQCompatError
from torchq_compat.explain import explain
from torchq_compat.quantize_fx import (
    convert_fx,
    convert_to_reference_fx,
    fuse_fx,
    get_default_convert_custom_config,
    get_default_prepare_custom_config,
    prepare_fx,
    prepare_qat_fx,
)

__all__ = [
    "TorchQCompatError",
    "convert_fx",
    "convert_to_reference_fx",
    "explain",
    "fuse_fx",
    "get_default_convert_custom_config",
    "get_default_prepare_custom_config",
    "prepare_fx",
    "prepare_qat_fx",
]
