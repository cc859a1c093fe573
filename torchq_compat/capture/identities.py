"""nn.Identity leaves no trace in an exported graph; FX kept it as an op that shares its input's observer.

Without it ``linear -> identity -> relu`` would look like a pair the backend fuses.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["show_identities"]


def show_identities(model: nn.Module) -> None:
    """Make every Identity of ``model``, the package's own copy, export to ``aten.alias``."""
    for module in model.modules():
        if type(module) is nn.Identity:
            module.forward = _alias  # type: ignore[method-assign]


def _alias(input: Tensor) -> Tensor:
    alias: Tensor = torch.ops.aten.alias.default(input)
    return alias
