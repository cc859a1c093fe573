"""``torch.ao.quantization.fx.custom_config``: the same classes, from here on.

A config object is data; torch.ao's own class is read as it is, so a script's objects keep working.
"""

from torchq_compat.support.torch_ao import (
    ConvertCustomConfig,
    FuseCustomConfig,
    PrepareCustomConfig,
    StandaloneModuleConfigEntry,
)

__all__ = [
    "ConvertCustomConfig",
    "FuseCustomConfig",
    "PrepareCustomConfig",
    "StandaloneModuleConfigEntry",
]
