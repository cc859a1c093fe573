"""The classes of ``torch.ao.quantization.fx.custom_config``, to import from here.

They are torch.ao's own classes, so the config objects of a script keep working.
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
