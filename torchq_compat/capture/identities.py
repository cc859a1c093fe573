"""Makes nn.Identity visible in an exported graph; FX kept it as an op that shares its input's observer.

Without this op ``linear -> identity -> relu`` would look like a pair that the backend fuses. The Identity
inside a FloatFunctional is no op in FX either: FX replaces such modules by FXFloatFunctional, which has none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchq_compat.support.torch_ao import FloatFunctional
from torchq_compat.support.upstream import pytree

__all__ = ["show_identities"]


def show_identities(model: nn.Module) -> None:
    """Make every Identity in ``model``, the package's own copy, export as an ``aten.alias`` of each input
    tensor, except those inside a FloatFunctional."""
    functionals = [module for module in model.modules() if isinstance(module, FloatFunctional)]
    placeholders = {functional.activation_post_process for functional in functionals}
    for module in model.modules():
        if type(module) is nn.Identity and module not in placeholders:
            module.forward = _alias  # type: ignore[method-assign]


def _alias(input: Any) -> Any:
    return pytree.tree_map_only(Tensor, torch.ops.aten.alias.default, input)
