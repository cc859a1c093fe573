"""``torch.ao.quantization.fx.custom_config`` -> ``torchq_compat.custom_config``: the same classes."""

from __future__ import annotations

from torchq_compat.migrate.legacy_names import MOVED_CLASSES
from torchq_compat.migrate.moved_names import MovedNames
from torchq_compat.migrate.rewrites.rewrite import Rewrite

__all__ = ["REWRITE"]

REWRITE = Rewrite(
    "custom-config-classes",
    "TQ103",
    "PrepareCustomConfig and its kin come from torchq_compat.custom_config",
    MovedNames("TQ103", MOVED_CLASSES[:1], guests=MOVED_CLASSES[1:]).find,
)
